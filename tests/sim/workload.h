// SPDX-License-Identifier: Apache-2.0
// Makes events from a seed, with an eye on the simulation: bursts and quiet times, adapters and texts by Zipf's law,
// phases in which adapters come and go, in which uploads crawl, in which readers stop.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "tests/sim/simulation.h"

namespace moelora::sim {

// Of `name`, or null.
const Shape* find_shape(const std::string& name);
const std::vector<Shape>& shapes();

class Random {
 public:
  explicit Random(uint64_t seed) : state_(mix(seed, 0x3f84d5b5b5470917ull)) {}
  uint64_t next() { return mix(++state_, 0x9216d5d98979fb1bull); }
  int64_t below(int64_t n) { return n <= 0 ? 0 : static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  bool chance(int64_t permille) { return below(1000) < permille; }
  double unit() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
  // From 1 on.
  int64_t geometric(int64_t mean);

 private:
  uint64_t state_;
};

class Workload {
 public:
  Workload(const Shape& shape, uint64_t seed);
  Event next(const Simulation& simulation);

 private:
  struct Phase {
    int64_t events = 0;  // left
    int64_t step = 300, upload = 250, come = 700, go = 15, churn = 20;
    int64_t slow = 30, pins = 5;
  };
  void choose_phase();
  Event some_adapter_event(const Simulation& simulation);
  Event some_session_event(const Simulation& simulation);
  Event request_event(const Simulation& simulation);
  Event load_event(int64_t name);
  int64_t zipf();
  int64_t some_permille() { return random_.chance(30) ? 0 : random_.chance(800) ? 1000 : 500; }

  const Shape shape_;
  Random random_;
  Phase phase_;
  std::vector<double> cumulative_;  // of zipf
  std::vector<int64_t> loaded_;     // by name: the adapter's number, or -1
  std::vector<int64_t> pinned_;
  int64_t num_requests_ = 0, num_adapters_ = 0, num_sessions_ = 0;
};

}  // namespace moelora::sim
