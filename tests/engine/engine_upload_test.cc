// SPDX-License-Identifier: Apache-2.0
// Adapters on their way to the device: their requests wait and the others run, whatever is cancelled, unloaded, closed
// or fails meanwhile, and no token depends on any of it. A gate behind each chunk holds uploads as long as a test
// wants.
#include <random>

#include "tests/engine/upload_support.h"

namespace moelora::test {

using std::chrono::milliseconds;

TEST_CASE("a request waits for its adapter while others run", "[engine]") {
  const Setup quiet;
  const auto expected = read_all(*quiet.submit(request_of({5, 6, 7}, 12, quiet.adapter(1))));
  const Setup held({}, false);
  const auto waiting = held.submit(request_of({5, 6, 7}, 12, held.adapter(1)));
  held.gate->wait_for_upload();
  for (int i = 0; i < 3; ++i) {
    RequestResult result;
    CHECK(read_all(*held.submit(request_of({1, 2}, 400)), &result).size() == 400);  // more steps than may overtake
    CHECK(result.adapter_wait_ms == 0);
  }
  CHECK(waiting->stream->unread() == 0);
  CHECK(held.engine->stats().adapters_resident == 0);
  CHECK(waiting->request.adapter->slot.load() == 0);
  held.gate->open();
  RequestResult result;
  CHECK(read_all(*waiting, &result) == expected);
  CHECK(result.adapter_wait_ms > 0);
  CHECK(result.adapter_wait_ms <= result.queue_ms);
  CHECK(held.engine->stats().adapter_loads == 1);
  CHECK(held.engine->stats().adapter_hits == 0);
}

TEST_CASE("running requests keep their tokens while adapters come and go", "[engine]") {
  const auto run = [](bool loading) {
    EngineOptions options;
    options.max_adapters_resident = 4;
    const Setup setup(options);
    std::vector<std::shared_ptr<Adapter>> own = {nullptr, setup.adapter(1), setup.adapter(2, 24)};
    std::vector<std::shared_ptr<Submission>> running;
    for (int32_t i = 0; i < 6; ++i) {
      Request request = request_of({1 + i, 2, 3}, 300, own[static_cast<size_t>(i) % own.size()]);
      request.sampling.temperature = i % 2 == 0 ? 0.0f : 0.8f;
      request.sampling.seed = 9;
      running.push_back(setup.submit(request));
    }
    std::atomic<bool> done{false};
    std::thread loader([&] {
      for (uint64_t seed = 10; loading && !done; ++seed) {
        const auto adapter = setup.adapter(seed, 64);
        const auto queue = std::make_shared<CompletionQueue>();
        queue->expect(1);
        setup.engine->prefetch_adapter(adapter, seed % 3 == 0 ? nullptr : queue, 1, 1);
        if (seed % 3 != 0 && ready_status(*queue) != Status::kOk) {
          break;
        }
        setup.engine->unload_adapter(adapter, false);
      }
    });
    std::vector<std::vector<int32_t>> tokens;
    for (const auto& submission : running) {
      tokens.push_back(read_all(*submission));
    }
    done = true;
    loader.join();
    if (loading) {
      CHECK(setup.engine->stats().adapter_loads > 6);
    }
    return tokens;
  };
  CHECK(run(true) == run(false));
}

TEST_CASE("many more adapters than fit, in any order of requests", "[engine]") {
  constexpr uint64_t kAdapters = 24;
  std::vector<std::vector<int32_t>> expected;
  for (const unsigned seed : {0u, 1u, 2u}) {
    EngineOptions options;
    options.max_adapters_resident = 3;
    options.max_num_sequences = 5;
    options.device_memory_bytes = 3 << 20;
    const Setup setup(options);
    std::vector<Request> requests;
    for (uint64_t i = 0; i < kAdapters; ++i) {
      const auto adapter = setup.adapter(i, 8 + 8 * static_cast<int32_t>(i % 3));
      for (int32_t j = 0; j < 3; ++j) {
        requests.push_back(request_of({static_cast<int32_t>(i), j, 3}, 10 + 5 * j, adapter));
      }
    }
    std::vector<size_t> order(requests.size());
    for (size_t i = 0; i < order.size(); ++i) {
      order[i] = i;
    }
    std::mt19937 random(seed);
    if (seed > 0) {
      std::shuffle(order.begin(), order.end(), random);
    }
    std::vector<std::shared_ptr<Submission>> submissions(requests.size());
    for (const size_t i : order) {
      submissions[i] = setup.submit(requests[i]);
    }
    std::vector<std::vector<int32_t>> tokens;
    for (const auto& submission : submissions) {
      tokens.push_back(read_all(*submission));
    }
    if (seed == 0) {
      expected = tokens;
    }
    CHECK(tokens == expected);
    const EngineStats stats = setup.engine->stats();
    CHECK(stats.adapter_loads >= kAdapters);
    CHECK(stats.adapter_evictions >= kAdapters - 3);
    CHECK(stats.pages_kv == stats.pages_cached);
  }
}

TEST_CASE("unloading an adapter on its way", "[engine]") {
  const Setup setup({}, false);
  const auto adapter = setup.adapter(1);
  const auto queue = std::make_shared<CompletionQueue>();
  queue->expect(1);
  setup.engine->prefetch_adapter(adapter, queue, 1, 1);
  setup.gate->wait_for_upload();
  setup.engine->unload_adapter(adapter, true);
  CHECK(ready_status(*queue) == Status::kNotFound);  // answered before the upload ends
  // With a request that waits for it the upload is of use, and its pages go with the request.
  const auto wanted = setup.adapter(2);
  const auto waiting = setup.submit(request_of({1, 2}, 4, wanted));
  setup.engine->unload_adapter(wanted, false);
  CHECK(setup.engine->stats().pages_adapter > 0);
  setup.gate->open();
  RequestResult result;
  CHECK(read_all(*waiting, &result).size() == 4);
  CHECK(result.status == Status::kOk);
  CHECK(setup.engine->stats().adapter_loads == 2);
  CHECK(comes_true([&] { return setup.engine->stats().pages_adapter == 0; }));
  CHECK(setup.engine->stats().adapter_host_bytes == 0);
}

TEST_CASE("an upload that nobody needs any more is given up", "[engine]") {
  const Setup setup({}, false);
  const auto first = setup.adapter(1);
  const auto second = setup.adapter(2);
  setup.engine->prefetch_adapter(first, nullptr, 1, 1);
  setup.engine->prefetch_adapter(second, nullptr, 1, 1);
  CHECK(comes_true([&] { return setup.engine->stats().adapter_loads == 2; }));
  setup.gate->wait_for_upload();
  setup.engine->unload_adapter(second, false);
  setup.engine->submit(make_submission(*setup.engine, request_of({1}, 1)));  // the engine has seen it
  CHECK(comes_true([&] { return setup.engine->stats().requests_finished == 1; }));
  setup.gate->open();
  CHECK(comes_true([&] { return first->slot.load() > 0; }));
  CHECK(read_all(*setup.submit(request_of({1, 2}, 4, setup.adapter(3)))).size() == 4);
  CHECK(setup.gate->arrived() == 2);  // an adapter of this model is one chunk
  CHECK(setup.engine->stats().adapters_resident == 2);
}

TEST_CASE("a clone of a resident adapter is resident", "[engine]") {
  const Setup setup;
  const auto adapter = setup.adapter(1);
  CHECK(read_all(*setup.submit(request_of({1, 2}, 4, adapter))).size() == 4);
  const auto clone = setup.engine->register_adapter("clone", adapter->image, 0.5f, false);
  CHECK(clone->slot.load() == adapter->slot.load());
  CHECK(clone->slot.load() > 0);
}

TEST_CASE("idle sessions keep their KV while requests wait for a slot", "[engine]") {
  EngineOptions options;
  options.max_adapters_resident = 1;
  const Setup setup(options, false);
  const auto session = setup.engine->create_session(nullptr, 0.0f);
  Request turn = request_of({1, 2, 3}, 4);
  turn.session = session;
  CHECK(read_all(*setup.submit(turn)).size() == 4);
  const auto first = setup.submit(request_of({1, 2}, 4, setup.adapter(1)));
  const auto second = setup.submit(request_of({1, 2}, 4, setup.adapter(2)));
  setup.gate->wait_for_upload();
  CHECK(read_all(*setup.submit(request_of({1, 2}, 50))).size() == 50);
  setup.gate->open();
  CHECK(read_all(*first).size() == 4);
  CHECK(read_all(*second).size() == 4);
  CHECK(setup.engine->stats().sessions_evicted == 0);
  CHECK(setup.engine->session_info(session).num_computed > 0);
}

TEST_CASE("an upload gives way to the KV of those who run", "[engine]") {
  const Setup quiet;
  const auto expected = read_all(*quiet.submit(request_of({5, 6, 7}, 600)));
  const auto page_bytes = quiet.engine->info().page_bytes;
  const auto kv_pages = (3 + 600 + 15) / 16 * quiet.engine->info().pages_per_block;
  const auto image_pages =
      (static_cast<int64_t>(quiet.adapter(1, 64)->image->stream_bytes) + page_bytes - 1) / page_bytes;
  EngineOptions options;
  options.device_memory_bytes = (std::max<int64_t>(kv_pages, image_pages) + 4) * page_bytes;
  options.output_buffer_tokens = 20;  // it stands still until it is read
  const Setup held(options, false);
  const auto running = held.submit(request_of({5, 6, 7}, 600));
  CHECK(comes_true([&] { return running->stream->unread() == 20; }));
  const auto waiting = held.submit(request_of({1, 2}, 4, held.adapter(1, 64)));
  held.gate->wait_for_upload();
  std::atomic<bool> done{false};
  RequestResult result;
  std::vector<int32_t> tokens;
  std::thread reader([&] {
    tokens = read_all(*running, &result);
    done = true;
  });
  CHECK(comes_true([&] { return held.engine->stats().pages_free == 0; }));
  std::this_thread::sleep_for(milliseconds(50));
  CHECK(!done);  // the loader writes to the pages that it needs
  CHECK(held.engine->stats().preemptions == 0);
  held.gate->open();
  reader.join();
  CHECK(tokens == expected);
  CHECK(read_all(*waiting, &result).size() == 4);
  CHECK(result.status == Status::kOk);
}

TEST_CASE("cancelling a request that waits for its adapter", "[engine]") {
  const Setup setup({}, false);
  const auto adapter = setup.adapter(1);
  const auto waiting = setup.submit(request_of({1, 2}, 4, adapter));
  Request late = request_of({1, 2}, 4, adapter);
  late.deadline_ms = 200;
  const auto overdue = setup.submit(late);
  setup.gate->wait_for_upload();
  setup.engine->cancel(waiting, false);
  RequestResult result;
  CHECK(read_all(*waiting, &result).empty());
  CHECK(result.status == Status::kCancelled);
  CHECK(read_all(*overdue, &result).empty());
  CHECK(result.status == Status::kDeadline);
  CHECK(result.adapter_wait_ms > 0);
  setup.gate->open();
  CHECK(comes_true([&] { return adapter->slot.load() > 0; }));  // what was begun is kept
  CHECK(read_all(*setup.submit(request_of({1, 2}, 4, adapter))).size() == 4);
  CHECK(setup.engine->stats().adapter_loads == 1);
}

TEST_CASE("closing an engine with adapters on their way", "[engine]") {
  for (int i = 0; i < 6; ++i) {
    Setup setup({}, false);
    std::vector<std::shared_ptr<Submission>> submissions;
    for (uint64_t seed = 0; seed < 7; ++seed) {  // more than the loader takes at once
      submissions.push_back(setup.submit(request_of({1, 2}, 4, setup.adapter(seed))));
    }
    setup.gate->wait_for_upload();
    std::thread opener([&] {
      std::this_thread::sleep_for(milliseconds(4 * i));
      setup.gate->open();
    });
    setup.engine.reset();
    opener.join();
    check_ended_or_closed(submissions);
  }
}

TEST_CASE("a failed upload ends the requests that wait for it, and only those", "[engine]") {
  Setup setup;
  std::atomic<int> failures{1};
  setup.plan->chunk_queued = [&] {
    if (failures-- > 0) {
      throw Error(Status::kCuda, "a copy: made to fail");
    }
  };
  const auto adapter = setup.adapter(1);
  const auto base = setup.submit(request_of({1, 2}, 100));
  const auto waiting = setup.submit(request_of({1, 2}, 4, adapter));
  RequestResult result;
  CHECK(read_all(*waiting, &result).empty());
  CHECK(result.status == Status::kCuda);
  CHECK(result.message.find("adapter 'random 1'") != std::string::npos);
  CHECK(result.message.find("made to fail") != std::string::npos);
  CHECK(setup.engine->stats().pages_adapter == 0);
  CHECK(read_all(*base).size() == 100);
  CHECK(read_all(*setup.submit(request_of({1, 2}, 4, adapter))).size() == 4);  // the next one tries again

  failures = 1;
  const auto queue = std::make_shared<CompletionQueue>();
  queue->expect(1);
  setup.engine->prefetch_adapter(setup.adapter(2), queue, 1, 1);
  CHECK(ready_status(*queue) == Status::kCuda);
  CHECK(setup.engine->health(nullptr) == Status::kOk);

  setup.plan->chunk_queued = [] { throw Error(Status::kDeviceLost, "a copy: made to fail"); };
  CHECK(read_all(*setup.submit(request_of({1, 2}, 4, setup.adapter(3))), &result).empty());
  CHECK(result.status == Status::kDeviceLost);
  CHECK(setup.engine->health(nullptr) == Status::kDeviceLost);
}

}  // namespace moelora::test
