// SPDX-License-Identifier: Apache-2.0
// Adapters that requests find on the device: which count as hits, and those that the queue brings there ahead of need.
#include "tests/engine/upload_support.h"

namespace moelora::test {
namespace {

int64_t pages_of(const Setup& setup, const Adapter& adapter) {
  const int64_t page_bytes = setup.engine->info().page_bytes;
  return (static_cast<int64_t>(adapter.image->stream_bytes) + page_bytes - 1) / page_bytes;
}

int64_t kv_pages(const Setup& setup, int64_t tokens) {
  return (tokens + 15) / 16 * setup.engine->info().pages_per_block;
}

}  // namespace

TEST_CASE("a request counts one hit however often it could not start", "[engine]") {
  const Setup quiet;
  const auto sample = quiet.adapter(1);
  EngineOptions options;
  options.device_memory_bytes =
      (pages_of(quiet, *sample) + kv_pages(quiet, 300) + kv_pages(quiet, 100)) * quiet.engine->info().page_bytes;
  options.output_buffer_tokens = 30;
  const Setup setup(options);
  const auto adapter = setup.adapter(1);
  const auto running = setup.submit(request_of({5, 6, 7}, 290, adapter));
  CHECK(comes_true([&] { return running->stream->unread() > 0; }));
  CHECK(adapter->loads == 1);
  CHECK(adapter->hits == 0);
  std::vector<std::shared_ptr<Submission>> waiting;
  for (int32_t i = 0; i < 4; ++i) {  // the adapter is there, pages for their prompts are not
    waiting.push_back(setup.submit(request_of(std::vector<int32_t>(250, i), 4, adapter)));
  }
  CHECK(read_all(*running).size() == 290);
  for (const auto& submission : waiting) {
    CHECK(read_all(*submission).size() == 4);
  }
  CHECK(adapter->loads == 1);
  CHECK(adapter->hits == 4);
  CHECK(setup.engine->stats().adapter_hits == 4);
  // A prefetch is no request.
  const auto queue = std::make_shared<CompletionQueue>();
  queue->expect(1);
  setup.engine->prefetch_adapter(adapter, queue, 1, 1);
  CHECK(ready_status(*queue) == Status::kOk);
  CHECK(adapter->hits == 4);
}

// One request runs in the only row; how many adapters are there, or on their way, while `adapters` wait.
struct Queue {
  explicit Queue(EngineOptions options, const std::vector<uint64_t>& adapters = {}) : setup(prepared(options)) {
    setup.plan->queued = [this](Stream&) {
      if (slow) {
        std::this_thread::sleep_for(std::chrono::milliseconds(4));
      }
    };
    if (!adapters.empty()) {
      run(request_of({5, 6, 7}, kOutputs));
    }
    for (const uint64_t seed : adapters) {
      waiting.push_back(setup.submit(request_of({1, 2}, 4, setup.adapter(seed))));
    }
  }
  static EngineOptions prepared(EngineOptions options) {
    options.max_num_sequences = 1;
    return options;
  }
  // It takes seconds, until `finish`.
  void run(const Request& request) {
    slow = true;
    running = setup.submit(request);
    CHECK(comes_true([&] { return running->stream->unread() > 0; }));
  }
  [[nodiscard]] bool is_running() const { return !running->stream->finished(); }
  void finish() {
    CHECK(is_running());
    slow = false;
    CHECK(read_all(*running).size() == static_cast<size_t>(running->request.sampling.max_tokens));
    for (const auto& submission : waiting) {
      RequestResult result;
      CHECK(read_all(*submission, &result).size() == 4);
      CHECK(result.status == Status::kOk);
    }
  }
  static constexpr int32_t kOutputs = 400;
  std::atomic<bool> slow{false};
  Setup setup;
  std::shared_ptr<Submission> running;
  std::vector<std::shared_ptr<Submission>> waiting;
};

TEST_CASE("adapters of the next requests come while no row is free", "[engine]") {
  for (const int64_t count : {0, 2, 8}) {
    INFO("prefetch_requests " << count);
    EngineOptions options;
    options.prefetch_requests = count;
    Queue queue(options, {1, 2, 3, 4, 5, 6});
    const auto wanted = static_cast<int64_t>(std::min<size_t>(static_cast<size_t>(count), queue.waiting.size()));
    CHECK(comes_true([&] { return queue.setup.engine->stats().adapters_resident == wanted; }));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const EngineStats stats = queue.setup.engine->stats();
    CHECK(stats.adapters_resident == wanted);
    CHECK(stats.adapter_loads == static_cast<uint64_t>(wanted));
    for (size_t i = 0; i < queue.waiting.size(); ++i) {
      CHECK((queue.waiting[i]->request.adapter->slot.load() > 0) == (static_cast<int64_t>(i) < wanted));
    }
    queue.finish();
    CHECK(queue.setup.engine->stats().adapter_loads == 6);
    CHECK(queue.setup.engine->stats().adapter_hits == 0);  // each load was for one of them
  }
}

TEST_CASE("what the queue wants stays on the device", "[engine]") {
  EngineOptions options;
  options.max_adapters_resident = 2;
  Queue queue(options, {1, 2, 3, 4, 5, 6});
  const auto resident = [&](size_t i) { return queue.waiting[i]->request.adapter->slot.load() > 0; };
  CHECK(comes_true([&] { return resident(0) && resident(1); }));
  // Neither those behind nor the host take their slots.
  const auto other = queue.setup.adapter(7);
  queue.setup.engine->prefetch_adapter(other, nullptr, 1, 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  CHECK(queue.setup.engine->stats().adapter_loads == 2);
  CHECK(queue.setup.engine->stats().adapter_evictions == 0);
  queue.finish();
  CHECK(comes_true([&] { return other->slot.load() > 0; }));
  CHECK(queue.setup.engine->stats().adapter_loads == 7);  // each once
}

TEST_CASE("an adapter that is there before its request wants it is not evicted for those before", "[engine]") {
  EngineOptions options;
  options.max_adapters_resident = 2;
  Queue queue(options);
  const Setup& setup = queue.setup;
  const auto idle = setup.adapter(9);
  const auto late = setup.adapter(1);
  for (const auto& adapter : {late, idle}) {  // `late` is the one that would leave first
    CHECK(read_all(*setup.submit(request_of({1, 2}, 4, adapter))).size() == 4);
  }
  queue.run(request_of({5, 6, 7}, Queue::kOutputs));
  const auto first = setup.adapter(2);
  for (const auto& adapter : {first, late}) {
    queue.waiting.push_back(make_submission(*setup.engine, request_of({1, 2}, 4, adapter)));
  }
  std::vector<Error> errors;
  setup.engine->submit_batch(queue.waiting, &errors);
  CHECK(comes_true([&] { return first->slot.load() > 0; }));
  CHECK(late->slot.load() > 0);
  CHECK(idle->slot.load() == 0);
  queue.finish();
  CHECK(late->loads == 1);
  CHECK(late->hits == 1);
}

TEST_CASE("nothing leaves for an adapter of the queue that would not fit nevertheless", "[engine]") {
  const Setup quiet;
  const auto small = pages_of(quiet, *quiet.adapter(1));
  const auto large = pages_of(quiet, *quiet.adapter(2, 64));
  REQUIRE(large > small + kv_pages(quiet, 48));
  EngineOptions options;
  options.device_memory_bytes =
      (large + small + kv_pages(quiet, 100 + Queue::kOutputs) + kv_pages(quiet, 48)) * quiet.engine->info().page_bytes;
  Queue queue(options);
  const Setup& setup = queue.setup;
  const auto session = setup.engine->create_session(nullptr, 0.0f);
  Request turn = request_of({1, 2, 3}, 20);
  turn.session = session;
  CHECK(read_all(*setup.submit(turn)).size() == 20);
  const auto idle = setup.adapter(1);
  CHECK(read_all(*setup.submit(request_of({1, 2}, 4, idle))).size() == 4);
  queue.run(request_of(std::vector<int32_t>(100, 1), Queue::kOutputs, setup.adapter(3, 64)));
  // What is idle is smaller than its adapter, and what is free no larger than its prompt.
  queue.waiting.push_back(setup.submit(request_of(std::vector<int32_t>(400, 1), 4, setup.adapter(2, 64))));
  std::this_thread::sleep_for(std::chrono::milliseconds(40));
  CHECK(queue.is_running());
  CHECK(queue.waiting[0]->request.adapter->loads == 0);
  CHECK(setup.engine->stats().sessions_evicted + setup.engine->stats().adapter_evictions == 0);
  CHECK(idle->slot.load() > 0);
  queue.finish();
  CHECK(queue.waiting[0]->request.adapter->loads == 1);
}

}  // namespace moelora::test
