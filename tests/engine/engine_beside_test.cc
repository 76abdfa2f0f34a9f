// SPDX-License-Identifier: Apache-2.0
// A device that works beside the host: tokens of a step are handed out while the next one runs, and nothing of that may
// be seen but the time. (engine_test_beside runs the tests of requests and batches in the same way.)
#include <chrono>
#include <random>
#include <thread>

#include "tests/engine/engine_support.h"

namespace moelora::test {
namespace {

std::shared_ptr<Engine> open(bool asynchronous, EngineOptions options = {},
                             std::shared_ptr<TestDevice::Plan> plan = std::make_shared<TestDevice::Plan>()) {
  options.num_threads = 2;
  options.audit = 2;
  plan->asynchronous = asynchronous;
  options.wrap_device = TestDevice::wrapper(plan);
  return Engine::create(options, case_dir("qwen3_moe") + "/model");
}

// Requests of many kinds, more than run at once; preemption is in engine_batch_test.cc.
std::vector<std::vector<int32_t>> mixed_answers(bool asynchronous) {
  EngineOptions options;
  options.max_num_sequences = 6;
  options.max_batch_tokens = 24;
  options.max_adapters_resident = 2;
  options.device_memory_bytes = 500 << 10;
  const auto engine = open(asynchronous, options);
  std::vector<std::shared_ptr<Adapter>> adapters = {nullptr};
  for (const char* name : {"attn", "experts", "rslora"}) {
    adapters.push_back(load_adapter(*engine, case_dir("qwen3_moe") + "/adapters/" + name, name));
  }
  std::mt19937 random(4);
  std::vector<std::shared_ptr<Submission>> submissions;
  for (int i = 0; i < 40; ++i) {
    std::vector<int32_t> prompt(1 + random() % 20);
    std::generate(prompt.begin(), prompt.end(), [&] { return static_cast<int32_t>(random() % 300); });
    Request request = greedy_request(prompt, 60 + static_cast<int32_t>(random() % 60));
    request.adapter = adapters[random() % adapters.size()];
    request.sampling.ignore_eos = i % 3 == 0;
    request.sampling.logprobs = i % 4 == 0 ? 2 : -1;
    request.sampling.temperature = i % 2 == 0 ? 0.8f : 0.0f;
    request.sampling.repetition_penalty = i % 5 == 0 ? 1.3f : 1.0f;
    request.sampling.seed = 7 + static_cast<uint64_t>(i);
    request.stop_tokens = {static_cast<int32_t>(random() % 300)};
    submissions.push_back(make_submission(*engine, request));
  }
  std::vector<Error> errors;
  engine->submit_batch(submissions, &errors);
  std::vector<std::vector<int32_t>> answers;
  for (const auto& submission : submissions) {
    RequestResult result;
    answers.push_back(read_all(*submission, &result));
    CHECK(result.status == Status::kOk);
    CHECK(result.output_tokens == static_cast<int32_t>(answers.back().size()));
  }
  CHECK(engine->drain(10000) == Status::kOk);
  CHECK(engine->stats().pages_kv == engine->stats().pages_cached);
  return answers;
}

}  // namespace

TEST_CASE("a device beside the host gives the tokens of one that is not", "[engine]") {
  CHECK(mixed_answers(true) == mixed_answers(false));
}

TEST_CASE("tokens of a step are read while the next one runs", "[engine]") {
  auto plan = std::make_shared<TestDevice::Plan>();
  std::atomic<size_t> unread_when_queued[4] = {};
  std::shared_ptr<Submission> submission;
  // `queued` runs before the engine has handed out what the step before gave, the next call after.
  plan->queued = [&](Stream&) {
    const int step = plan->steps.load();
    if (submission != nullptr && step < 4) {
      unread_when_queued[step] = submission->stream->unread();
    }
  };
  const auto engine = open(true, {}, plan);
  submission = make_submission(*engine, greedy_request({1, 2, 3}, 4));
  engine->submit(submission);
  CHECK(read_all(*submission).size() == 4);  // the last is handed out although no step follows
  CHECK(unread_when_queued[0] == 0);
  CHECK(unread_when_queued[1] == 0);  // the first token is out only once the second step is on its way
}

TEST_CASE("a limit on unread tokens is kept to the token", "[engine]") {
  EngineOptions options;
  options.output_buffer_tokens = 3;
  const auto engine = open(true, options);
  const auto slow = make_submission(*engine, greedy_request({1, 2, 3}, 50));
  engine->submit(slow);
  CHECK(comes_true([&] { return slow->stream->unread() >= 3; }));
  for (int i = 0; i < 100; ++i) {
    REQUIRE(slow->stream->unread() == 3);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(read_all(*slow).size() == 50);
}

TEST_CASE("closing an engine hands out what steps have given", "[engine]") {
  for (int i = 0; i < 20; ++i) {
    auto engine = open(true);
    const auto submission = make_submission(*engine, greedy_request({1, 2, 3}, 400));
    engine->submit(submission);
    std::this_thread::sleep_for(std::chrono::milliseconds(i));
    engine.reset();
    RequestResult result;
    const auto tokens = read_all(*submission, &result);
    CHECK(result.output_tokens == static_cast<int32_t>(tokens.size()));
    CHECK((result.status == Status::kClosed || tokens.size() == 400));
  }
}

}  // namespace moelora::test
