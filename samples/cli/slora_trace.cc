// SPDX-License-Identifier: Apache-2.0
// See slora_trace.h. The generator is Matsumoto and Nishimura's MT19937; normal values come from Marsaglia's polar
// method, gamma values from Marsaglia and Tsang (shape > 1) or Ahrens and Dieter (shape < 1).
#include "samples/cli/slora_trace.h"

#include <algorithm>
#include <cmath>
#include <set>

namespace moelora_cli {

LegacyRandom::LegacyRandom(uint32_t seed) {
  for (uint32_t i = 0; i < kWords; ++i) {
    state_[i] = seed;
    seed = 1812433253u * (seed ^ (seed >> 30)) + i + 1;
  }
}

uint32_t LegacyRandom::next() {
  constexpr int kShift = 397;
  if (at_ == kWords) {
    for (int i = 0; i < kWords; ++i) {
      const uint32_t word = (state_[i] & 0x80000000u) | (state_[(i + 1) % kWords] & 0x7fffffffu);
      state_[i] = state_[(i + kShift) % kWords] ^ (word >> 1) ^ ((word & 1u) != 0 ? 0x9908b0dfu : 0u);
    }
    at_ = 0;
  }
  uint32_t word = state_[at_++];
  word ^= word >> 11;
  word ^= (word << 7) & 0x9d2c5680u;
  word ^= (word << 15) & 0xefc60000u;
  return word ^ (word >> 18);
}

double LegacyRandom::uniform() {
  const uint32_t high = next() >> 5;
  const uint32_t low = next() >> 6;
  return (high * 67108864.0 + low) / 9007199254740992.0;
}

// Masked rejection: one word a try.
int64_t LegacyRandom::integer(int64_t low, int64_t end) {
  const auto range = static_cast<uint32_t>(end - low - 1);
  uint32_t mask = range;
  for (int shift = 1; shift < 32; shift *= 2) {
    mask |= mask >> shift;
  }
  if (range == 0) {
    return low;
  }
  uint32_t value = next() & mask;
  while (value > range) {
    value = next() & mask;
  }
  return low + value;
}

double LegacyRandom::standard_exponential() {
  return -std::log(1.0 - uniform());
}

double LegacyRandom::power(double exponent) {
  return std::pow(1.0 - std::exp(-standard_exponential()), 1.0 / exponent);
}

double LegacyRandom::standard_normal() {
  if (has_normal_) {
    has_normal_ = false;
    return normal_;
  }
  double x = 0, y = 0, square = 0;
  do {
    x = 2.0 * uniform() - 1.0;
    y = 2.0 * uniform() - 1.0;
    square = x * x + y * y;
  } while (square >= 1.0 || square == 0.0);
  const double factor = std::sqrt(-2.0 * std::log(square) / square);
  normal_ = factor * x;
  has_normal_ = true;
  return factor * y;
}

double LegacyRandom::standard_gamma(double shape) {
  if (shape == 1.0) {
    return standard_exponential();
  }
  if (shape < 1.0) {
    for (;;) {
      const double u = uniform();
      const double v = standard_exponential();
      if (u <= 1.0 - shape) {
        const double x = std::pow(u, 1.0 / shape);
        if (x <= v) {
          return x;
        }
      } else {
        const double y = -std::log((1.0 - u) / shape);
        const double x = std::pow(1.0 - shape + shape * y, 1.0 / shape);
        if (x <= v + y) {
          return x;
        }
      }
    }
  }
  const double b = shape - 1.0 / 3.0;
  const double c = 1.0 / std::sqrt(9.0 * b);
  for (;;) {
    double x = 0, v = 0;
    do {
      x = standard_normal();
      v = 1.0 + c * x;
    } while (v <= 0.0);
    v = v * v * v;
    const double u = uniform();
    if (u < 1.0 - 0.0331 * (x * x) * (x * x) || std::log(u) < 0.5 * x * x + b * (1.0 - v + std::log(v))) {
      return b * v;
    }
  }
}

double LegacyRandom::gamma(double shape, double scale) {
  return scale * standard_gamma(shape);
}

std::vector<TraceRequest> slora_trace(const SloraWorkload& workload) {
  LegacyRandom random(workload.seed);
  std::vector<TraceRequest> trace(static_cast<size_t>(workload.rate * workload.duration));
  for (TraceRequest& request : trace) {
    const double draw = random.power(workload.alpha);
    request.adapter = workload.num_adapters == 0
                          ? -1
                          : std::min(static_cast<int64_t>(draw * static_cast<double>(workload.num_adapters)),
                                     workload.num_adapters - 1);
  }
  for (TraceRequest& request : trace) {
    request.input = static_cast<int32_t>(random.integer(workload.input_low, workload.input_end));
  }
  for (TraceRequest& request : trace) {
    request.output = static_cast<int32_t>(random.integer(workload.output_low, workload.output_end));
  }
  double now = 0;
  const double variance = workload.cv * workload.cv;
  for (TraceRequest& request : trace) {
    now += random.gamma(1.0 / variance, variance / workload.rate);
    request.arrival = now;
  }
  return trace;
}

int64_t count_adapters(const std::vector<TraceRequest>& trace) {
  std::set<int64_t> seen;
  for (const TraceRequest& request : trace) {
    if (request.adapter >= 0) {
      seen.insert(request.adapter);
    }
  }
  return static_cast<int64_t>(seen.size());
}

}  // namespace moelora_cli
