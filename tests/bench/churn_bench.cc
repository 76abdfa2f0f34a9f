// SPDX-License-Identifier: Apache-2.0
// What running streams notice of adapters that are loaded and unloaded all the time: the time between two tokens of a
// stream in a quiet engine and in one with a thread that loads, by turns, and the tokens, which must be the same bits.
//
//   churn_bench MODEL_DIR [STREAMS [TOKENS [RANK [BYTES_PER_SECOND [ROUNDS [random [DEVICE]]]]]]]
//
// BYTES_PER_SECOND bounds the loader (option upload_bytes_per_second; 0 = no bound); "random" takes the shapes of
// MODEL_DIR/config.json with random weights, anything else its weights; DEVICE: cpu (initially) or cuda. Exits 1 if a
// token differed.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <random>
#include <thread>

#include "runtime/engine/engine.h"

namespace {

using namespace moelora;

struct Settings {
  std::string model;
  int streams = 4;
  int32_t tokens = 256;
  int32_t rank = 16;
  int64_t bytes_per_second = 64 << 20;
  int rounds = 4;
  bool random_weights = false;
  std::string device = "cpu";
};

struct Run {
  std::vector<std::vector<int32_t>> tokens;  // of streams
  std::vector<double> gaps_ms;               // between two tokens of a stream, all streams
  uint64_t loads = 0;
  double seconds = 0;
};

double now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Loads a fresh adapter, waits until it is on the device, unloads it, and again.
class Loader {
 public:
  Loader(Engine& engine, const std::vector<std::shared_ptr<const AdapterImage>>& images)
      : thread_([this, &engine, &images] { run(engine, images); }) {}
  ~Loader() {
    done_ = true;
    thread_.join();
  }
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

 private:
  void run(Engine& engine, const std::vector<std::shared_ptr<const AdapterImage>>& images) {
    for (size_t i = 0; !done_; ++i) {
      const auto adapter = engine.register_adapter("passing", images[i % images.size()], 1.0f, true);
      const auto queue = std::make_shared<CompletionQueue>();
      queue->expect(1);
      engine.prefetch_adapter(adapter, queue, 1, 1);
      Event event;
      bool closed = false;
      while (!done_ && queue->wait(100, &event, 1, &closed) == 0) {
      }
      engine.unload_adapter(adapter, false);
    }
  }
  std::atomic<bool> done_{false};
  std::thread thread_;
};

// All streams decode together; their first tokens are no gap.
Run run_streams(Engine& engine, const Settings& settings, const std::vector<std::shared_ptr<Adapter>>& own) {
  Run run;
  const auto streams = static_cast<size_t>(settings.streams);
  run.tokens.resize(streams);
  const auto queue = std::make_shared<CompletionQueue>();
  std::vector<std::shared_ptr<Submission>> submissions;
  for (size_t i = 0; i < streams; ++i) {
    auto submission = std::make_shared<Submission>();
    Request& request = submission->request;
    for (int32_t t = 0; t < 32; ++t) {
      request.prompt.push_back((t * 37 + static_cast<int32_t>(i) * 11) % engine.info().config.vocab_size);
    }
    request.adapter = own[i % own.size()];
    request.sampling.max_tokens = settings.tokens;
    request.sampling.ignore_eos = true;
    submission->stream =
        std::make_unique<TokenStream>(request, engine.info().config.vocab_size, queue, static_cast<uint64_t>(i), 0);
    submissions.push_back(std::move(submission));
  }
  const uint64_t loads_before = engine.stats().adapter_loads;
  const double begun = now();
  std::vector<Error> errors;
  engine.submit_batch(submissions, &errors);
  std::vector<double> last(streams, 0);
  size_t finished = 0;
  while (finished < streams) {
    Event events[32];
    bool closed = false;
    const size_t count = queue->wait(-1, events, 32, &closed);
    const double at = now();
    for (size_t e = 0; e < count; ++e) {
      const auto i = static_cast<size_t>(events[e].handle);
      if (events[e].kind == EventKind::kFinished) {
        ++finished;
      }
      int32_t token = 0;
      size_t n = 0;
      while (submissions[i]->stream->read(0, &token, 1, &n) == Status::kOk) {
        run.tokens[i].push_back(token);
        if (last[i] > 0) {
          run.gaps_ms.push_back(at - last[i]);
        }
        last[i] = at;
      }
    }
  }
  run.seconds = (now() - begun) / 1e3;
  run.loads = engine.stats().adapter_loads - loads_before;
  return run;
}

double percentile(std::vector<double>& sorted, double part) {
  return sorted.empty() ? 0 : sorted[static_cast<size_t>(part * static_cast<double>(sorted.size() - 1))];
}

void print(const char* what, Run& run) {
  std::sort(run.gaps_ms.begin(), run.gaps_ms.end());
  std::printf("%-6s gaps %6zu, p50 %8.3f ms, p90 %8.3f, p99 %8.3f, max %8.3f; %llu loads in %.1f s\n", what,
              run.gaps_ms.size(), percentile(run.gaps_ms, 0.5), percentile(run.gaps_ms, 0.9),
              percentile(run.gaps_ms, 0.99), run.gaps_ms.empty() ? 0 : run.gaps_ms.back(),
              static_cast<unsigned long long>(run.loads), run.seconds);
}

void append(Run& all, const Run& run) {
  all.gaps_ms.insert(all.gaps_ms.end(), run.gaps_ms.begin(), run.gaps_ms.end());
  all.loads += run.loads;
  all.seconds += run.seconds;
}

bool bench(const Settings& settings) {
  EngineOptions options;
  options.random_weights = settings.random_weights;
  options.device = settings.device;
  options.upload_bytes_per_second = settings.bytes_per_second;
  const auto engine = Engine::create(options, settings.model);
  const ModelConfig& config = engine->info().config;
  std::vector<std::shared_ptr<Adapter>> own;
  for (uint64_t i = 0; i < 2; ++i) {
    own.push_back(engine->register_adapter("own " + std::to_string(i),
                                           random_adapter(config, settings.rank, true, true, i), 1.0f, false));
  }
  own.push_back(nullptr);
  std::vector<std::shared_ptr<const AdapterImage>> images;  // made before: only loads are measured
  for (uint64_t i = 10; i < 14; ++i) {
    images.push_back(random_adapter(config, settings.rank, true, true, i));
  }
  std::printf("%d streams, 2 adapters of rank %d and the base, %d tokens; passing adapters of %.2f MB at %.1f MB/s\n",
              settings.streams, settings.rank, settings.tokens, static_cast<double>(images[0]->stream.size()) / 1e6,
              static_cast<double>(settings.bytes_per_second) / 1e6);
  Run quiet, loud;
  run_streams(*engine, settings, own);  // warms up
  bool same = true;
  std::vector<std::vector<int32_t>> tokens;
  for (int round = 0; round < settings.rounds; ++round) {
    Run calm = run_streams(*engine, settings, own);
    append(quiet, calm);
    print("quiet", calm);
    Run busy;
    {
      const Loader loader(*engine, images);
      busy = run_streams(*engine, settings, own);
    }
    append(loud, busy);
    print("loads", busy);
    tokens = round == 0 ? calm.tokens : tokens;
    same = same && calm.tokens == tokens && busy.tokens == tokens;
  }
  std::printf("all rounds\n");
  print("quiet", quiet);
  print("loads", loud);
  std::printf("p99 with loads / quiet: %.2f; tokens %s\n",
              percentile(loud.gaps_ms, 0.99) / percentile(quiet.gaps_ms, 0.99), same ? "the same" : "DIFFER");
  return same;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(
        stderr,
        "usage: churn_bench MODEL_DIR [STREAMS [TOKENS [RANK [BYTES_PER_SECOND [ROUNDS [random [DEVICE]]]]]]]\n");
    return 2;
  }
  Settings settings;
  settings.model = argv[1];
  const auto number = [&](int i, int64_t otherwise) {
    return argc > i ? std::strtoll(argv[i], nullptr, 10) : otherwise;
  };
  settings.streams = static_cast<int>(number(2, settings.streams));
  settings.tokens = static_cast<int32_t>(number(3, settings.tokens));
  settings.rank = static_cast<int32_t>(number(4, settings.rank));
  settings.bytes_per_second = number(5, settings.bytes_per_second);
  settings.rounds = static_cast<int>(number(6, settings.rounds));
  settings.random_weights = argc > 7 && std::string(argv[7]) == "random";
  settings.device = argc > 8 ? argv[8] : "cpu";
  try {
    return bench(settings) ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "churn_bench: %s\n", error.what());
    return 1;
  }
}
