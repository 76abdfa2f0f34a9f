// SPDX-License-Identifier: Apache-2.0
// Calls that meet on one object from several threads: only statuses come out, and nobody waits for ever.
#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "tests/api/host.h"
#include "tests/support/comes_true.h"

using namespace moelora_host;

namespace {

const std::vector<int32_t> kPrompt = {52, 20, 29, 93, 163, 281, 246};

moelora_status read_one(moelora_engine* engine, moelora_request request, int32_t timeout_ms) {
  int32_t token = 0;
  return moelora_request_read(engine, request, timeout_ms, &token, 1, nullptr, 0, nullptr, nullptr);
}

// An engine where `blocked` waits for ever: the only adapter slot is held by another adapter that the host has pinned.
struct Stuck {
  Host host;
  moelora_adapter pinned;
  moelora_adapter waiting;
  moelora_request blocked = 0;
  Stuck() : host(options()), pinned(host.load("attn")), waiting(host.load("rslora")) {
    CHECK(host.answer(kPrompt, 1, pinned).size() == 1);  // resident now
    REQUIRE(moelora_adapter_pin(host.engine, pinned, nullptr) == MOELORA_OK);
    blocked = host.submit(kPrompt, 8, waiting);
  }
  static Options options() {
    Options options;
    options.max_adapters_resident = 1;
    return options;
  }
};

}  // namespace

TEST_CASE("a second reader is told so; closing wakes the first") {
  const Stuck stuck;
  moelora_engine* engine = stuck.host.engine;
  std::atomic<moelora_status> first{99};
  std::thread reader([&] {
    moelora_status status = MOELORA_E_BUSY;  // while the other one is inside
    while (status == MOELORA_E_BUSY) {
      status = read_one(engine, stuck.blocked, -1);
    }
    first = status;
  });
  moelora_status second = MOELORA_TIMEOUT;
  moelora::test::comes_true([&] {
    second = read_one(engine, stuck.blocked, 0);
    return second != MOELORA_TIMEOUT;
  });
  CHECK(second == MOELORA_E_BUSY);
  CHECK(first == 99);
  CHECK(moelora_request_close(engine, stuck.blocked, nullptr) == MOELORA_OK);
  reader.join();
  CHECK(first == MOELORA_E_CLOSED);
  CHECK(read_one(engine, stuck.blocked, 0) == MOELORA_E_HANDLE);
}

TEST_CASE("the last release wakes every waiting call") {
  moelora_queue* queue = nullptr;
  REQUIRE(moelora_queue_create(&queue, nullptr) == MOELORA_OK);
  auto stuck = std::make_unique<Stuck>();
  moelora_engine* engine = stuck->host.engine;
  const moelora_request blocked = stuck->blocked;
  const moelora_adapter waiting = stuck->waiting;
  const moelora_request watched = stuck->host.build(kPrompt, 8, stuck->waiting);
  REQUIRE(moelora_request_set_queue(engine, watched, queue, 5, nullptr) == MOELORA_OK);
  REQUIRE(moelora_request_submit(engine, watched, nullptr) == MOELORA_OK);
  std::atomic<moelora_status> read{99}, drained{99}, generated{99};
  std::atomic<int> inside{0};
  std::thread reader([&] {
    ++inside;
    read = read_one(engine, blocked, -1);
  });
  std::thread generator([&] {
    int32_t tokens[16];
    size_t n = 0;
    ++inside;
    generated = moelora_generate_tokens(engine, waiting, 1.0f, kPrompt.data(), kPrompt.size(), nullptr, tokens, 16, &n,
                                        nullptr, nullptr);
  });
  while (inside < 2) {
    std::this_thread::yield();
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  std::thread drainer([&] {
    ++inside;
    drained = moelora_engine_drain(engine, -1, nullptr);
  });
  while (inside < 3) {
    std::this_thread::yield();
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  stuck.reset();
  reader.join();
  generator.join();
  drainer.join();
  // E_HANDLE: a thread that came too late on a busy machine.
  CHECK((read == MOELORA_E_CLOSED || read == MOELORA_E_HANDLE));
  CHECK((generated == MOELORA_E_CLOSED || generated == MOELORA_E_HANDLE));
  CHECK((drained == MOELORA_OK || drained == MOELORA_E_HANDLE));
  CHECK(moelora_engine_health(engine, nullptr) == MOELORA_E_HANDLE);
  moelora_queue_destroy(queue);
}

TEST_CASE("destroying a queue wakes its waiter") {
  moelora_queue* queue = nullptr;
  REQUIRE(moelora_queue_create(&queue, nullptr) == MOELORA_OK);
  std::atomic<moelora_status> status{99};
  std::thread waiter([&] {
    moelora_event event;
    size_t n = 0;
    status = moelora_queue_wait(queue, -1, &event, 1, &n, nullptr);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  moelora_queue_destroy(queue);
  waiter.join();
  CHECK((status == MOELORA_E_CLOSED || status == MOELORA_E_HANDLE));
}

TEST_CASE("wakes from any thread arrive, one at a time") {
  moelora_queue* queue = nullptr;
  REQUIRE(moelora_queue_create(&queue, nullptr) == MOELORA_OK);
  moelora_event events[8];
  size_t n = 0;
  CHECK(moelora_queue_wait(queue, 0, events, 8, &n, nullptr) == MOELORA_TIMEOUT);
  for (int i = 0; i < 100; ++i) {
    CHECK(moelora_queue_wake(queue, nullptr) == MOELORA_OK);
  }
  CHECK(moelora_queue_wait(queue, 0, events, 8, &n, nullptr) == MOELORA_OK);
  CHECK(n == 1);
  CHECK(events[0].kind == MOELORA_EVENT_WAKE);
  std::thread waker([&] { moelora_queue_wake(queue, nullptr); });
  CHECK(moelora_queue_wait(queue, -1, events, 8, &n, nullptr) == MOELORA_OK);
  waker.join();
  CHECK(moelora_queue_wait(queue, 0, events, 0, &n, nullptr) == MOELORA_E_INVALID);
  moelora_queue_destroy(queue);
}

TEST_CASE("close, cancel and read race") {
  const Host host;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int round = 0; round < 25; ++round) {
        moelora_request request = 0;
        const moelora_sampling sampling = greedy(24);
        if (moelora_request_create(host.engine, &request, nullptr) != MOELORA_OK ||
            moelora_request_set_tokens(host.engine, request, kPrompt.data(), kPrompt.size(), nullptr) != MOELORA_OK ||
            moelora_request_set_sampling(host.engine, request, &sampling, nullptr) != MOELORA_OK ||
            moelora_request_submit(host.engine, request, nullptr) != MOELORA_OK) {
          ++wrong;
          continue;
        }
        const auto pause = std::chrono::microseconds(random() % 3000);
        std::thread closer([&, pause] {
          std::this_thread::sleep_for(pause);
          if (round % 3 == 0 && moelora_request_cancel(host.engine, request, 0, nullptr) < 0) {
            ++wrong;
          }
          if (moelora_request_close(host.engine, request, nullptr) != MOELORA_OK) {
            ++wrong;
          }
        });
        moelora_status status = MOELORA_OK;
        while (status == MOELORA_OK || status == MOELORA_TIMEOUT || status == MOELORA_END) {
          status = read_one(host.engine, request, 20);
        }
        if (status != MOELORA_E_CLOSED && status != MOELORA_E_HANDLE) {
          ++wrong;
        }
        closer.join();
        if (moelora_request_close(host.engine, request, nullptr) != MOELORA_E_HANDLE) {
          ++wrong;
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(wrong == 0);
  CHECK(host.answer(kPrompt, 4).size() == 4);
}

TEST_CASE("adapters come and go under requests of other threads") {
  const Host host;
  const std::vector<int32_t> wanted = host.answer(kPrompt, 6, host.load("attn"));
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  std::thread changer([&] {
    const std::string dir = adapter_dir("experts");
    for (int i = 0; i < 20; ++i) {
      moelora_adapter adapter = 0;
      const std::string name = "n" + std::to_string(i);
      if (moelora_adapter_load_dir(host.engine, name.data(), name.size(), dir.data(), dir.size(), 0, &adapter,
                                   nullptr) != MOELORA_OK ||
          host.answer(kPrompt, 2, adapter).size() != 2 ||
          moelora_adapter_unload(host.engine, adapter, 0, nullptr) != MOELORA_OK) {
        ++wrong;
      }
    }
    stop = true;
  });
  moelora_adapter attn = 0;
  REQUIRE(moelora_adapter_find(host.engine, "attn", 4, &attn, nullptr) == MOELORA_OK);
  while (!stop) {
    if (host.answer(kPrompt, 6, attn) != wanted) {
      ++wrong;
    }
  }
  changer.join();
  CHECK(wrong == 0);
}
