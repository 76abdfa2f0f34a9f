// SPDX-License-Identifier: Apache-2.0
// What a batch may and may not change: rows do not depend on neighbours, chunks or adapters beside them.
#include <random>

#include "tests/engine/engine_support.h"

namespace moelora::test {
namespace {

std::shared_ptr<Engine> open(const char* name, int64_t batch_tokens = 512, int64_t threads = 2) {
  EngineOptions options;
  options.num_threads = threads;
  options.max_batch_tokens = batch_tokens;
  options.max_num_sequences = 16;
  options.audit = 2;
  return Engine::create(test_options(options), case_dir(name) + "/model");
}

}  // namespace

TEST_CASE("base rows keep their bits beside adapter rows and after them", "[engine]") {
  std::mt19937 random(3);
  for (const char* name : {"qwen3_moe", "qwen2_moe", "olmoe"}) {
    INFO(name);
    const auto plain = open(name);
    const int32_t vocab = plain->info().config.vocab_size;
    const auto a = random_prompt(random, 37, vocab);
    const auto b = random_prompt(random, 5, vocab);
    const Answer alone_a = answers(*plain, {batch_request(a, nullptr)})[0];
    const Answer alone_b = answers(*plain, {batch_request(b, nullptr)})[0];

    const auto engine = open(name);
    const auto attn = load_adapter(*engine, case_dir(name) + "/adapters/attn", "attn");
    const auto experts = load_adapter(*engine, case_dir(name) + "/adapters/experts", "experts");
    CHECK(answers(*engine, {batch_request(a, nullptr)})[0] == alone_a);
    const auto mixed = answers(*engine, {batch_request(a, nullptr), batch_request(a, attn), batch_request(b, experts),
                                         batch_request(b, nullptr), batch_request(b, attn)});
    CHECK(mixed[0] == alone_a);
    CHECK(mixed[3] == alone_b);
    CHECK(mixed[1].logits != alone_a.logits);
    CHECK(mixed[2].logits != alone_b.logits);
    CHECK(answers(*engine, {batch_request(b, nullptr)})[0] == alone_b);
  }
}

TEST_CASE("a row does not depend on neighbours, chunk borders or threads", "[engine]") {
  std::mt19937 random(4);
  const auto engine = open("qwen3_moe");
  const auto experts = load_adapter(*engine, case_dir("qwen3_moe") + "/adapters/attn_experts", "x");
  const auto experts_2d = load_adapter(*engine, case_dir("qwen3_moe") + "/adapters/experts_2d", "y");
  std::vector<Request> requests;
  for (size_t i = 0; i < 12; ++i) {
    requests.push_back(batch_request(random_prompt(random, 1 + random() % 90, 320),
                                     i % 3 == 0 ? nullptr : (i % 3 == 1 ? experts : experts_2d),
                                     0.25f * static_cast<float>(i)));
  }
  const auto together = answers(*engine, requests);
  for (size_t i = 0; i < requests.size(); ++i) {
    INFO("request " << i);
    CHECK(answers(*engine, {requests[i]})[0] == together[i]);
  }
  const auto small = open("qwen3_moe", 17, 1);
  const auto small_x = load_adapter(*small, case_dir("qwen3_moe") + "/adapters/attn_experts", "x");
  const auto small_y = load_adapter(*small, case_dir("qwen3_moe") + "/adapters/experts_2d", "y");
  for (size_t i = 0; i < requests.size(); ++i) {
    if (requests[i].adapter != nullptr) {
      requests[i].adapter = i % 3 == 1 ? small_x : small_y;
    }
  }
  CHECK(answers(*small, requests) == together);
}

TEST_CASE("scale 0 is the base to the bit, and scale acts per request", "[engine]") {
  std::mt19937 random(5);
  const auto engine = open("mixtral");
  const auto adapter = load_adapter(*engine, case_dir("mixtral") + "/adapters/attn_experts", "x");
  const auto prompt = random_prompt(random, 20, 320);
  const auto result = answers(*engine, {batch_request(prompt, nullptr), batch_request(prompt, adapter, 0.0f),
                                        batch_request(prompt, adapter, 0.5f), batch_request(prompt, adapter, 1.0f)});
  CHECK(result[0] == result[1]);
  CHECK(result[2].logits != result[3].logits);
  CHECK(result[2].logits != result[0].logits);
}

TEST_CASE("preemption and eviction change nothing in the answers", "[engine]") {
  std::mt19937 random(6);
  const auto roomy = open("qwen3_moe");
  EngineOptions options;
  options.num_threads = 2;
  options.max_num_sequences = 8;
  options.max_batch_tokens = 32;
  options.prefix_cache = false;  // what is preempted is computed again
  options.audit = 2;
  // Room for about two of the eight sequences and one adapter.
  options.device_memory_bytes = 40 * roomy->info().page_bytes;
  const auto tight = Engine::create(test_options(options), case_dir("qwen3_moe") + "/model");
  std::vector<std::vector<Answer>> results;
  for (const auto& engine : {roomy, tight}) {
    random.seed(6);
    std::vector<Request> requests;
    std::vector<std::shared_ptr<Adapter>> adapters = {nullptr};
    for (const char* name : {"attn", "experts", "patterns", "rslora"}) {
      adapters.push_back(load_adapter(*engine, case_dir("qwen3_moe") + "/adapters/" + name, name));
    }
    for (size_t i = 0; i < 10; ++i) {
      Request request = batch_request(random_prompt(random, 20 + 7 * i, 320), adapters[i % adapters.size()]);
      request.sampling.max_tokens = 60;
      request.sampling.repetition_penalty = i % 2 == 0 ? 1.0f : 1.3f;
      request.capture_from = -1;
      requests.push_back(request);
    }
    results.push_back(answers(*engine, requests));
  }
  CHECK(results[0] == results[1]);
  CHECK(tight->stats().preemptions > 0);
  CHECK(tight->stats().adapter_evictions > 0);
  CHECK(tight->stats().pages_kv == 0);
}

}  // namespace moelora::test
