// SPDX-License-Identifier: Apache-2.0
// The engine against transformers + PEFT: logits of every kept position and greedy text, all cases of a folder at
// once in mixed batches, on both CPU op tables.
#include <cmath>
#include <map>

#include "tests/engine/engine_support.h"

namespace moelora::test {
namespace {

const std::vector<std::string> kRefused = {"dora", "embed_head", "save_head"};

double relative_error(const std::vector<float>& got, const GoldenCase& one) {
  const auto vocab = static_cast<size_t>(one.shape[1]);
  double worst = 0;
  for (size_t row = 0; row < static_cast<size_t>(one.shape[0]); ++row) {
    double error = 0;
    double largest = 0;
    for (size_t i = 0; i < vocab; ++i) {
      const double expected = static_cast<double>(one.logits[row * vocab + i]);
      const double difference = std::abs(static_cast<double>(got[row * vocab + i]) - expected);
      error = difference <= error ? error : difference;  // a NaN sticks
      largest = std::max(largest, std::abs(expected));
    }
    worst = error / largest <= worst ? worst : error / largest;
  }
  return worst;
}

void check_folder(const std::string& name, const std::string& kernels) {
  const GoldenFolder folder = load_golden(name);
  EngineOptions options;
  options.num_threads = 2;
  options.kernels = kernels;
  options.max_batch_tokens = 48;  // prompts of 100 are cut into chunks
  options.max_num_sequences = 16;
  options.audit = 2;
  const auto engine = Engine::create(options, folder.dir + "/model");
  std::map<std::string, std::shared_ptr<Adapter>> adapters;
  std::vector<std::shared_ptr<Submission>> submissions;
  std::vector<const GoldenCase*> cases;
  for (const GoldenCase& one : folder.cases) {
    if (std::find(kRefused.begin(), kRefused.end(), one.adapter) != kRefused.end()) continue;
    if (!one.adapter.empty() && adapters.count(one.adapter) == 0) {
      adapters[one.adapter] = load_adapter(*engine, folder.dir + "/adapters/" + one.adapter, one.adapter);
    }
    Request request;
    request.prompt = one.prompt;
    request.adapter = one.adapter.empty() ? nullptr : adapters[one.adapter];
    request.capture_from = one.first_position;
    request.sampling.max_tokens = static_cast<int32_t>(one.greedy.size());
    request.sampling.ignore_eos = true;
    cases.push_back(&one);
    submissions.push_back(make_submission(*engine, request));
  }
  REQUIRE(submissions.size() >= 4);
  std::vector<Error> errors;
  engine->submit_batch(submissions, &errors);
  for (size_t i = 0; i < submissions.size(); ++i) {
    INFO(name << " adapter '" << cases[i]->adapter << "' prompt of " << cases[i]->prompt.size());
    REQUIRE(errors[i].status() == Status::kOk);
    const std::vector<int32_t> tokens = read_all(*submissions[i]);
    CHECK(submissions[i]->stream->captured_first() == cases[i]->first_position);
    const std::vector<float> logits = captured(*submissions[i], static_cast<int32_t>(cases[i]->shape[1]));
    REQUIRE(logits.size() >= static_cast<size_t>(cases[i]->shape[0] * cases[i]->shape[1]));
    CHECK(relative_error(logits, *cases[i]) <= 1e-4);
    REQUIRE(tokens.size() == cases[i]->greedy.size());
    for (size_t t = 0; t < tokens.size(); ++t) {
      if (tokens[t] == cases[i]->greedy[t]) continue;
      CHECK(cases[i]->greedy_margin[t] <= 1e-3);  // a tie may fall either way; the texts part here
      break;
    }
  }
}

}  // namespace

TEST_CASE("engine reproduces transformers + PEFT on every plain family", "[engine][golden]") {
  for (const char* name : {"llama3", "qwen3", "qwen3_moe", "qwen3_moe_mixed", "qwen3_moe_sharded", "qwen3_moe_f32",
                           "mixtral", "mixtral_f16_window", "olmoe", "qwen2_moe"}) {
    for (const char* kernels : {"auto", "reference"}) {
      SECTION(std::string(name) + " " + kernels) { check_folder(name, kernels); }
    }
  }
}

}  // namespace moelora::test
