// SPDX-License-Identifier: Apache-2.0
// A GPU that faults for real: behind the fourth step a kernel writes to an address that is nobody's, after which CUDA
// refuses everything in this process. So this test is an executable of its own. Without a GPU it says that it was
// skipped.
#include <chrono>

#include "kernels/kernels.h"
#include "tests/engine/engine_support.h"

namespace moelora::test {

TEST_CASE("a kernel that faults makes the engine DEVICE_LOST, and closing does not hang") {
  if (list_devices_cuda().empty()) {
    WARN("skipped: no CUDA device");
    return;
  }
  const auto plan = std::make_shared<TestDevice::Plan>();
  plan->queued = [&](Stream& stream) {
    if (plan->steps.load() != 3) {
      return;
    }
    FillRandomArgs wild;
    wild.data = reinterpret_cast<void*>(uintptr_t{4096});
    wild.count = 1024;
    kernels_cuda().fill_random(wild, stream);
  };
  EngineOptions options;
  options.device = "cuda";
  options.device_memory_bytes = 64 << 20;
  options.wrap_device = TestDevice::wrapper(plan);
  auto engine = Engine::create(options, case_dir("qwen3_moe") + "/model");
  const auto adapter = load_adapter(*engine, case_dir("qwen3_moe") + "/adapters/attn", "attn");
  std::vector<std::shared_ptr<Submission>> submissions;
  for (int32_t i = 0; i < 4; ++i) {
    Request request;
    request.prompt = {1 + i, 2, 3};
    request.sampling.max_tokens = 100;
    request.sampling.ignore_eos = true;
    request.adapter = i % 2 == 0 ? adapter : nullptr;
    submissions.push_back(make_submission(*engine, request));
  }
  std::vector<Error> errors;
  engine->submit_batch(submissions, &errors);
  for (const auto& submission : submissions) {
    RequestResult result;
    const auto tokens = read_all(*submission, &result);
    INFO(result.message);
    CHECK(result.status == Status::kDeviceLost);
    // An adapter may have been on its way for some of the steps.
    CHECK((tokens.size() == 3 || (submission->request.adapter != nullptr && tokens.size() < 3)));
  }
  std::string message;
  CHECK(engine->health(&message) == Status::kDeviceLost);
  INFO(message);
  CHECK_FALSE(message.empty());
  try {
    engine->submit(submissions[0]);
    FAIL("a request was taken");
  } catch (const Error& error) {
    CHECK(error.status() == Status::kDeviceLost);
  }
  const auto start = std::chrono::steady_clock::now();
  engine.reset();
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
}

}  // namespace moelora::test
