// SPDX-License-Identifier: Apache-2.0
// The synthetic workload of S-LoRA (arXiv 2311.03285, benchmarks/trace.py): which request arrives when, with which
// adapter and which lengths. All of it comes from one stream of NumPy's legacy generator, so that a trace is the
// published one draw by draw; the order of the draws is part of it.
#pragma once

#include <cstdint>
#include <vector>

namespace moelora_cli {

// MT19937 seeded with one integer, and the distributions of numpy.random.RandomState that the trace draws from.
class LegacyRandom {
 public:
  explicit LegacyRandom(uint32_t seed);
  double uniform();                           // [0, 1), 53 bits
  int64_t integer(int64_t low, int64_t end);  // [low, end), end - low <= 2^32
  double power(double exponent);              // density exponent * x^(exponent - 1) on [0, 1)
  double gamma(double shape, double scale);

 private:
  uint32_t next();
  double standard_exponential();
  double standard_normal();
  double standard_gamma(double shape);

  static constexpr int kWords = 624;
  uint32_t state_[kWords];
  int at_ = kWords;
  bool has_normal_ = false;
  double normal_ = 0;  // the second of a pair
};

struct SloraWorkload {
  int64_t num_adapters = 0;  // 0: every request runs on the base model
  double rate = 10;          // requests a second
  double duration = 120;     // seconds: rate * duration requests
  double cv = 1;             // coefficient of variation of the gaps; 1 = Poisson
  double alpha = 1;          // exponent of the adapters' distribution; 1 = uniform, smaller prefers the first ones
  int64_t input_low = 8, input_end = 512;  // tokens of a prompt, [low, end)
  int64_t output_low = 8, output_end = 512;
  uint32_t seed = 42;
};

struct TraceRequest {
  double arrival = 0;             // seconds from the start
  int64_t adapter = 0;            // 0 to num_adapters - 1; -1 = the base model
  int32_t input = 0, output = 0;  // tokens
};

// Arrivals, prompts and outputs do not depend on num_adapters.
std::vector<TraceRequest> slora_trace(const SloraWorkload& workload);
int64_t count_adapters(const std::vector<TraceRequest>& trace);  // different ones

}  // namespace moelora_cli
