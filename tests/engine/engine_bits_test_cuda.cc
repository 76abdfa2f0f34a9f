// SPDX-License-Identifier: Apache-2.0
// What adapters may not change on a GPU, to the bit: batches without any, and the rows of the base beside others.
// Without a GPU it says that it was skipped.
#include "kernels/kernels.h"
#include "tests/engine/engine_support.h"

namespace moelora::test {
namespace {

std::shared_ptr<Engine> open_on_gpu(const char* name) {
  EngineOptions options;
  options.device = "cuda";
  options.device_memory_bytes = 64 << 20;
  options.max_num_sequences = 32;
  options.audit = 2;
  return Engine::create(options, case_dir(name) + "/model");
}

void check_same(const std::vector<Answer>& result, const std::vector<Answer>& expected) {
  REQUIRE(result.size() == expected.size());
  for (size_t i = 0; i < result.size(); ++i) {
    INFO("request " << i);
    CHECK(result[i] == expected[i]);
  }
}

}  // namespace

TEST_CASE("on a GPU adapters change no bit of the base's rows") {
  if (list_devices_cuda().empty()) {
    WARN("skipped: no CUDA device");
    return;
  }
  std::mt19937 random(7);
  for (const char* name : {"qwen3_moe", "gpt_oss_mxfp4", "llama3"}) {
    // Few rows a step, with graphs and by the kernels for few, and prompts together of more than 64.
    for (const size_t count : {size_t{3}, size_t{20}}) {
      INFO(name << ", " << count << " requests");
      const auto plain = open_on_gpu(name);
      std::vector<Request> requests;
      for (size_t i = 0; i < count; ++i) {
        const size_t length = 1 + random() % (count > 3 ? 90 : 12);
        requests.push_back(batch_request(random_prompt(random, length, plain->info().config.vocab_size), nullptr));
      }
      const auto base = answers(*plain, requests);
      check_same(answers(*plain, requests), base);

      const auto engine = open_on_gpu(name);
      const auto attn = load_adapter(*engine, case_dir(name) + "/adapters/attn", "attn");
      const char* second = std::string(name) == "llama3" ? "mlp" : "experts";
      const auto other = load_adapter(*engine, case_dir(name) + "/adapters/" + second, second);
      check_same(answers(*engine, requests), base);

      std::vector<Request> mixed = requests;
      for (size_t i = 1; i < count; i += 2) {
        mixed[i].adapter = i % 4 == 1 ? other : attn;
      }
      // An adapter that is still on its way would have its request in later steps than the others.
      answers(*engine, mixed);
      const auto result = answers(*engine, mixed);
      for (size_t i = 0; i < count; ++i) {
        INFO("request " << i);
        CHECK((result[i].logits == base[i].logits) == (mixed[i].adapter == nullptr));
      }
    }
  }
}

}  // namespace moelora::test
