// SPDX-License-Identifier: Apache-2.0
// Stream: every index exactly once at every thread count, workers' numbers in range and their scratch apart, tasks in
// tasks, wake-up after sleep, and destruction at any moment.
#include "kernels/base/stream.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "tests/support/catch.h"

using moelora::Stream;

TEST_CASE("parallel_for hands out each index once") {
  for (int threads = 1; threads <= 4; ++threads) {
    Stream stream(threads, 128);
    for (const size_t count : {size_t{0}, size_t{1}, size_t{2}, size_t{1000}}) {
      INFO(threads << " threads, " << count);
      std::vector<std::atomic<int>> hits(count);
      std::atomic<int> bad_worker{0};
      stream.parallel_for(count, [&](size_t index, int worker) {
        hits[index].fetch_add(1);
        if (worker < 0 || worker >= threads) {
          bad_worker.fetch_add(1);
        }
      });
      int wrong = 0;
      for (const std::atomic<int>& hit : hits) {
        wrong += hit.load() != 1 ? 1 : 0;
      }
      CHECK(wrong == 0);
      CHECK(bad_worker.load() == 0);
    }
  }
}

TEST_CASE("parallel runs once on every worker, thousands of times in a row") {
  for (int threads = 1; threads <= 4; ++threads) {
    INFO(threads << " threads");
    Stream stream(threads, 64);
    std::vector<int> runs(static_cast<size_t>(threads), 0);
    constexpr int kRounds = 3000;
    for (int round = 0; round < kRounds; ++round) {
      stream.parallel([&](int worker) { ++runs[static_cast<size_t>(worker)]; });
    }
    CHECK(runs == std::vector<int>(static_cast<size_t>(threads), kRounds));
  }
}

TEST_CASE("what one op wrote the next one sees on every worker") {
  Stream stream(3, 64);
  std::vector<uint64_t> values(257, 1);
  std::vector<uint64_t> next(257);
  for (int round = 0; round < 200; ++round) {
    stream.parallel_for(values.size(), [&](size_t i, int) { next[i] = values[i] + values[(i + 100) % values.size()]; });
    stream.parallel_for(values.size(), [&](size_t i, int) { values[i] = next[i] % 1000003; });
  }
  // All values are equal at every round: 1, 2, 4, ... modulo 1000003.
  uint64_t expected = 1;
  for (int round = 0; round < 200; ++round) {
    expected = expected * 2 % 1000003;
  }
  CHECK(values == std::vector<uint64_t>(257, expected));
}

TEST_CASE("streams nest: each worker of one drives a stream of its own") {
  Stream outer(2, 64);
  Stream first(2, 64);
  Stream second(3, 64);
  Stream* const inner[] = {&first, &second};
  std::atomic<int> sum{0};
  outer.parallel_for(40, [&](size_t, int worker) {
    inner[worker]->parallel_for(100, [&](size_t index, int) { sum.fetch_add(static_cast<int>(index)); });
  });
  CHECK(sum.load() == 40 * 4950);
}

TEST_CASE("scratch is aligned, apart, and writable to its end") {
  Stream stream(4, 1000);
  CHECK(stream.scratch_bytes() >= 1000);
  stream.parallel([&](int worker) {
    std::byte* scratch = stream.scratch(worker);
    for (size_t i = 0; i < stream.scratch_bytes(); ++i) {
      scratch[i] = static_cast<std::byte>(worker + 1);
    }
  });
  for (int worker = 0; worker < 4; ++worker) {
    CHECK(reinterpret_cast<uintptr_t>(stream.scratch(worker)) % 64 == 0);
    int wrong = 0;
    for (size_t i = 0; i < stream.scratch_bytes(); ++i) {
      wrong += stream.scratch(worker)[i] != static_cast<std::byte>(worker + 1) ? 1 : 0;
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("workers that fell asleep wake up, and a stream may be destroyed at once, awake or asleep") {
  for (int threads = 1; threads <= 4; ++threads) {
    for (const int idle_ms : {0, 20}) {
      INFO(threads << " threads, idle " << idle_ms << " ms");
      for (int round = 0; round < 5; ++round) {
        Stream stream(threads, 64);
        std::atomic<int> count{0};
        std::this_thread::sleep_for(std::chrono::milliseconds(idle_ms));
        stream.parallel([&](int) { count.fetch_add(1); });
        CHECK(count.load() == threads);
        std::this_thread::sleep_for(std::chrono::milliseconds(idle_ms));
      }
      const Stream unused(threads, 64);
      CHECK(unused.num_threads() == threads);
    }
  }
}
