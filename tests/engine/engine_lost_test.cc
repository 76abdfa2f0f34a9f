// SPDX-License-Identifier: Apache-2.0
// A device that is lost in the middle of a step: all requests end with DEVICE_LOST and keep the tokens that they had,
// every later call says the same, and nothing hangs.
#include <chrono>
#include <thread>

#include "tests/engine/engine_support.h"

namespace moelora::test {
namespace {

template <class Call>
void check_lost(const Call& call) {
  Status status = Status::kOk;
  std::string message;
  try {
    call();
  } catch (const Error& error) {
    status = error.status();
    message = error.what();
  }
  CHECK(status == Status::kDeviceLost);
  CHECK(message.find("made to fail") != std::string::npos);
}

struct Lost {
  std::shared_ptr<TestDevice::Plan> plan = std::make_shared<TestDevice::Plan>();
  std::shared_ptr<Engine> engine;

  Lost(int steps, bool asynchronous, bool when_queued) {
    plan->asynchronous = asynchronous;
    plan->lost_when_queued = when_queued;
    plan->steps_until_loss = steps;
    EngineOptions options;
    options.num_threads = 2;
    options.max_num_sequences = 2;
    options.max_adapters_resident = 1;
    options.wrap_device = TestDevice::wrapper(plan);
    engine = Engine::create(options, case_dir("qwen3_moe") + "/model");
  }
};

}  // namespace

TEST_CASE("a lost device ends every request and every later call with DEVICE_LOST", "[engine]") {
  for (const bool asynchronous : {false, true}) {
    for (const bool when_queued : {false, true}) {
      INFO("asynchronous " << asynchronous << ", when queued " << when_queued);
      Lost lost(6, asynchronous, when_queued);
      Engine& engine = *lost.engine;
      const auto adapter = load_adapter(engine, case_dir("qwen3_moe") + "/adapters/attn", "attn");
      const auto session = engine.create_session(nullptr, 0.0f);
      std::vector<std::shared_ptr<Submission>> submissions;
      for (int32_t i = 0; i < 5; ++i) {  // two run, three wait
        Request request = greedy_request({1 + i, 2, 3}, 100);
        request.adapter = i % 2 == 0 ? adapter : nullptr;
        request.session = i == 1 ? session : nullptr;
        submissions.push_back(make_submission(engine, request));
      }
      std::vector<Error> errors;
      engine.submit_batch(submissions, &errors);
      size_t tokens = 0;
      for (const auto& submission : submissions) {
        RequestResult result;
        const size_t count = read_all(*submission, &result).size();
        CHECK(result.finish == FinishReason::kError);
        CHECK(result.status == Status::kDeviceLost);
        CHECK(result.message.find("made to fail") != std::string::npos);
        CHECK(result.output_tokens == static_cast<int32_t>(count));
        tokens += count;
      }
      CHECK(tokens == 10);  // two a step of the five steps before

      std::string message;
      CHECK(engine.health(&message) == Status::kDeviceLost);
      CHECK(message.find("made to fail") != std::string::npos);
      check_lost([&] { engine.submit(make_submission(engine, greedy_request({1}, 1))); });
      check_lost([&] { engine.create_session(nullptr, 0.0f); });
      check_lost([&] { engine.fork_session(session); });
      check_lost([&] { engine.register_adapter("other", adapter->image, 1.0f, false); });
      check_lost([&] { engine.prefetch_adapter(adapter, nullptr, 1, 2); });
      check_lost([&] { engine.measure_read_bandwidth(); });
      check_lost([&] { engine.drain(-1); });
      check_lost([&] { engine.trim(0); });
      engine.cancel(submissions[0], false);
      engine.close_session(session);
      engine.unload_adapter(adapter, true);
      CHECK(engine.stats().running == 0);
      CHECK(engine.stats().pages_kv == engine.stats().pages_cached);
    }
  }
}

TEST_CASE("those who wait when the device is lost are woken", "[engine]") {
  Lost lost(160, true, false);
  Engine& engine = *lost.engine;
  const auto first = load_adapter(engine, case_dir("qwen3_moe") + "/adapters/attn", "attn");
  const auto second = load_adapter(engine, case_dir("qwen3_moe") + "/adapters/rslora", "rslora");
  Request request = greedy_request({1, 2, 3}, 200);
  request.adapter = first;
  const auto submission = make_submission(engine, request);
  engine.submit(submission);
  int32_t token = 0;
  size_t count = 0;
  REQUIRE(submission->stream->read(20000, &token, 1, &count) == Status::kOk);
  // The only slot is in use: this waits as long as the request runs.
  const auto queue = std::make_shared<CompletionQueue>();
  queue->expect(1);
  engine.prefetch_adapter(second, queue, 5, 6);
  Status drained = Status::kOk;
  std::thread drain([&] {
    try {
      drained = engine.drain(-1);
    } catch (const Error& error) {
      drained = error.status();
    }
  });
  Event event;
  bool closed = false;
  REQUIRE(queue->wait(20000, &event, 1, &closed) == 1);
  CHECK(event.kind == EventKind::kAdapterReady);
  CHECK(event.status == Status::kDeviceLost);
  drain.join();
  CHECK(drained == Status::kDeviceLost);
  RequestResult result;
  CHECK(read_all(*submission, &result).size() == 158);
  CHECK(result.status == Status::kDeviceLost);
}

TEST_CASE("an engine whose device was lost closes at once, with and without a reader", "[engine]") {
  for (int i = 0; i < 10; ++i) {
    Lost lost(1 + i, i % 2 == 0, i % 3 == 0);
    const auto submission = make_submission(*lost.engine, greedy_request({1, 2, 3}, 100));
    lost.engine->submit(submission);
    if (i % 2 == 0) {
      read_all(*submission);
    }
    const auto start = std::chrono::steady_clock::now();
    lost.engine.reset();  // perhaps before the loss
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
    read_all(*submission);
  }
}

}  // namespace moelora::test
