// SPDX-License-Identifier: Apache-2.0
// Engines under pressure: answers of a pool that is too small are those of one that is not, swapped or computed again;
// deadlines that cannot be met are refused at once.
#include <chrono>
#include <random>
#include <thread>

#include "tests/engine/engine_support.h"

namespace moelora::test {

TEST_CASE("answers of an engine that swaps are those of an undisturbed one", "[engine]") {
  const std::string dir = case_dir("qwen3_moe");
  EngineOptions options;
  options.num_threads = 2;
  options.audit = 2;
  options.max_num_sequences = 4;
  options.output_buffer_tokens = 1 << 20;
  const auto roomy = Engine::create(test_options(options), dir + "/model");
  const int64_t block_bytes = roomy->info().pages_per_block * roomy->info().page_bytes;
  std::vector<std::string> names = {"", "attn", "attn_experts"};
  std::mt19937 random(7);
  std::vector<std::vector<int32_t>> prompts;
  for (size_t i = 0; i < 8; ++i) {
    prompts.push_back(random_prompt(random, 5 + 9 * i, roomy->info().config.vocab_size));
  }
  const auto run = [&](Engine& engine) {
    std::vector<std::shared_ptr<Adapter>> adapters;
    for (const std::string& name : names) {
      adapters.push_back(name.empty() ? nullptr : load_adapter(engine, dir + "/adapters/" + name, name));
    }
    std::vector<Request> requests;
    for (size_t i = 0; i < prompts.size(); ++i) {
      Request request = batch_request(prompts[i], adapters[i % adapters.size()]);
      request.capture_from = static_cast<int32_t>(prompts[i].size()) - 1;
      request.sampling.max_tokens = 90;
      requests.push_back(request);
    }
    return answers(engine, requests);
  };
  const auto expected = run(*roomy);
  REQUIRE(roomy->stats().preemptions == 0);
  int64_t adapter_bytes = 0;
  for (const auto& adapter : roomy->list_adapters()) {
    adapter_bytes += static_cast<int64_t>(adapter->image->stream_bytes) + roomy->info().page_bytes;
  }
  for (const int64_t swap_blocks : {0, 64}) {
    options.swap_memory_bytes = swap_blocks * block_bytes;
    options.device_memory_bytes = adapter_bytes + 18 * block_bytes;  // each needs 6 to 10 blocks
    const auto tight = Engine::create(test_options(options), dir + "/model");
    const auto got = run(*tight);
    const EngineStats stats = tight->stats();
    INFO("swap blocks " << swap_blocks << ", preemptions " << stats.preemptions << ", swaps " << stats.swaps);
    REQUIRE(got.size() == expected.size());
    for (size_t i = 0; i < got.size(); ++i) {
      INFO("request " << i << ", rows " << got[i].logits.size() << " of " << expected[i].logits.size());
      CHECK(got[i].tokens == expected[i].tokens);
      CHECK(got[i].logits == expected[i].logits);
    }
    CHECK(stats.preemptions > 0);
    CHECK((stats.swaps > 0) == (swap_blocks > 0));
    CHECK(stats.pages_kv == stats.pages_cached);
  }
}

TEST_CASE("an engine refuses early what it has measured to be impossible", "[engine]") {
  for (const bool refuses : {false, true}) {
    const auto plan = std::make_shared<TestDevice::Plan>();
    std::atomic<bool> slow{true};
    plan->queued = [&](Stream&) {
      if (slow) {
        std::this_thread::sleep_for(std::chrono::milliseconds(4));
      }
    };
    EngineOptions options;
    options.num_threads = 2;
    options.early_refusal = refuses;
    options.max_num_sequences = 1;
    options.wrap_device = TestDevice::wrapper(plan);
    const auto engine = Engine::create(options, case_dir("qwen3_moe") + "/model");
    const auto warm = make_submission(*engine, greedy_request({1, 2, 3}, 8));
    engine->submit(warm);
    read_all(*warm);
    const auto running = make_submission(*engine, greedy_request({1, 2, 3}, 450));
    engine->submit(running);
    Request late = greedy_request({4, 5, 6}, 450);  // 1.8 s at least
    late.deadline_ms = 1500;
    const auto refused = make_submission(*engine, late);
    engine->submit(refused);
    Request possible = late;
    possible.deadline_ms = 600000;
    const auto served = make_submission(*engine, possible);
    engine->submit(served);
    RequestResult result;
    CHECK(read_all(*refused, &result).empty());
    CHECK(result.finish == FinishReason::kDeadline);
    CHECK(result.status == Status::kDeadline);
    CHECK((result.message == "would be late") == refuses);
    CHECK((result.queue_ms < 1500) == refuses);
    slow = false;
    CHECK(read_all(*running).size() == 450);
    CHECK(read_all(*served).size() == 450);
  }
}

}  // namespace moelora::test
