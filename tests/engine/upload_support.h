// SPDX-License-Identifier: Apache-2.0
// Engines whose adapters are on their way for as long as a test wants: a gate behind each chunk holds their uploads.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "tests/engine/engine_support.h"

namespace moelora::test {

class Gate {
 public:
  explicit Gate(bool open) : open_(open) {}
  void pass() {
    std::unique_lock<std::mutex> lock(mutex_);
    ++arrived_;
    change_.notify_all();
    change_.wait(lock, [&] { return open_; });
  }
  void open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    change_.notify_all();
  }
  int arrived() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return arrived_;
  }
  // Until the loader stands at the gate.
  void wait_for_upload() {
    std::unique_lock<std::mutex> lock(mutex_);
    REQUIRE(change_.wait_for(lock, std::chrono::seconds(20), [&] { return arrived_ > 0; }));
  }

 private:
  std::mutex mutex_;
  std::condition_variable change_;
  bool open_;
  int arrived_ = 0;
};

struct Setup {
  explicit Setup(EngineOptions options = {}, bool open = true) : gate(std::make_shared<Gate>(open)) {
    plan->asynchronous = true;
    plan->chunk_queued = [held = gate] { held->pass(); };
    options.num_threads = 2;
    options.audit = 2;
    options.wrap_device = TestDevice::wrapper(plan);
    engine = Engine::create(options, case_dir("qwen3_moe") + "/model");
  }
  std::shared_ptr<Adapter> adapter(uint64_t seed, int32_t rank = 8) const {
    return engine->register_adapter("random " + std::to_string(seed),
                                    random_adapter(engine->info().config, rank, true, true, seed), 1.0f, false);
  }
  std::shared_ptr<Submission> submit(const Request& request) const {
    auto submission = make_submission(*engine, request);
    engine->submit(submission);
    return submission;
  }

  std::shared_ptr<TestDevice::Plan> plan = std::make_shared<TestDevice::Plan>();
  std::shared_ptr<Gate> gate;
  std::shared_ptr<Engine> engine;
};

inline Request request_of(std::vector<int32_t> prompt, int32_t max_tokens, std::shared_ptr<Adapter> adapter = nullptr) {
  Request request;
  request.prompt = std::move(prompt);
  request.adapter = std::move(adapter);
  request.sampling.max_tokens = max_tokens;
  request.sampling.ignore_eos = true;
  return request;
}

inline Status ready_status(CompletionQueue& queue) {
  Event event;
  bool closed = false;
  REQUIRE(queue.wait(20000, &event, 1, &closed) == 1);
  CHECK(event.kind == EventKind::kAdapterReady);
  return event.status;
}

}  // namespace moelora::test
