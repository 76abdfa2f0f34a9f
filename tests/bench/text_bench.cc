// SPDX-License-Identifier: Apache-2.0
// How fast text becomes tokens and tokens text, on one thread: text_bench MODEL_DIR TEXT_FILE [SECONDS]. Prints a line
// for encoding with a cold cache (a tokenizer that has seen nothing), one for encoding again, one for decoding.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "runtime/io/json.h"
#include "runtime/text/tokenizer.h"

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The best of the runs that fit into `budget` seconds, at least one.
template <class Action>
double best_seconds(double budget, const Action& action) {
  double best = 1e30;
  const auto begin = Clock::now();
  do {
    const auto start = Clock::now();
    action();
    best = std::min(best, seconds_since(start));
  } while (seconds_since(begin) < budget);
  return best;
}

void print(const char* what, size_t bytes, size_t tokens, double seconds) {
  std::printf("%-12s %8.2f MB/s %10.0f tokens/s\n", what, static_cast<double>(bytes) / 1e6 / seconds,
              static_cast<double>(tokens) / seconds);
}

void run(const char* model, const char* path, double budget) {
  const std::string text = moelora::read_text(path);
  const auto opened = Clock::now();
  const auto tokenizer = moelora::Tokenizer::open(model);
  std::printf("open         %8.3f s, %zu ids\n", seconds_since(opened), tokenizer->num_ids());
  const auto first = Clock::now();
  const std::vector<int32_t> ids = tokenizer->encode(text, {});
  const double cold = seconds_since(first);
  std::printf("tokens       %8zu\n", ids.size());
  print("encode, cold", text.size(), ids.size(), cold);
  print("encode", text.size(), ids.size(), best_seconds(budget, [&] { (void)tokenizer->encode(text, {}); }));
  print("decode", text.size(), ids.size(),
        best_seconds(budget, [&] { (void)tokenizer->decode(ids.data(), ids.size(), false); }));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: text_bench MODEL_DIR TEXT_FILE [SECONDS]\n");
    return 2;
  }
  try {
    run(argv[1], argv[2], argc > 3 ? std::atof(argv[3]) : 1.0);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "text_bench: %s\n", error.what());
    return 1;
  }
  return 0;
}
