// SPDX-License-Identifier: Apache-2.0
// Cuts of the sampler's candidate list; see candidates.h. All sums are in double and in order of id.
#include "kernels/sampling/candidates.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace moelora {
namespace {

// Unsigned integers in the order of the floats; -0 counts as 0.
uint32_t ordered_bits(float value) {
  value += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

void move_candidate(Candidates& list, int32_t from, int32_t to) {
  list.logits[to] = list.logits[from];
  list.weights[to] = list.weights[from];
  list.ids[to] = list.ids[from];
}

// Drops what keep(i) refuses; keep is called once for each i, in order.
template <class Keep>
void compact(Candidates& list, const Keep& keep) {
  int32_t kept = 0;
  for (int32_t i = 0; i < list.count; ++i) {
    if (keep(i)) {
      move_candidate(list, i, kept++);
    }
  }
  list.count = kept;
}

// Keeps the smallest best prefix whose masses reach `target` > 0; everything if they never do. Equal logits
// must have equal masses.
template <class Mass>
void keep_prefix(Candidates& list, double target, const Mass& mass) {
  constexpr int kLevels = 3;
  constexpr int kShift[kLevels] = {21, 10, 0};
  constexpr int kBits[kLevels] = {11, 11, 10};
  double above = 0.0;   // mass of all that is better than the prefix of bits
  uint32_t prefix = 0;  // of the worst kept logit, as far as known
  for (int level = 0; level < kLevels; ++level) {
    const int shift = kShift[level];
    const uint32_t bins = 1u << kBits[level];
    double histogram[1 << 11] = {};
    for (int32_t i = 0; i < list.count; ++i) {
      const uint32_t key = ordered_bits(list.logits[i]);
      if (level != 0 && (key >> (shift + kBits[level])) != prefix) {
        continue;
      }
      histogram[(key >> shift) & (bins - 1)] += mass(i);
    }
    uint32_t bin = bins - 1;
    for (; bin > 0 && above + histogram[bin] < target; --bin) {
      above += histogram[bin];
    }
    prefix = (prefix << kBits[level]) | bin;
    compact(list, [&](int32_t i) { return (ordered_bits(list.logits[i]) >> shift) >= prefix; });
  }
  compact(list, [&](int32_t i) {
    if (ordered_bits(list.logits[i]) != prefix) {
      return true;
    }
    if (above >= target) {
      return false;
    }
    above += mass(i);
    return true;
  });
}

double total_weight(const Candidates& list) {
  double total = 0.0;
  for (int32_t i = 0; i < list.count; ++i) {
    total += static_cast<double>(list.weights[i]);
  }
  return total;
}

}  // namespace

void keep_top_k(Candidates& list, int32_t k) {
  if (k >= list.count) {
    return;
  }
  keep_prefix(list, static_cast<double>(k), [](int32_t) { return 1.0; });
}

void keep_weight_at_least(Candidates& list, float least) {
  compact(list, [&](int32_t i) { return list.weights[i] >= least; });
}

void keep_top_p(Candidates& list, double top_p) {
  const double target = std::max(top_p * total_weight(list), std::numeric_limits<double>::min());
  keep_prefix(list, target, [&](int32_t i) { return static_cast<double>(list.weights[i]); });
}

int32_t draw_candidate(const Candidates& list, double uniform) {
  const double target = uniform * total_weight(list);
  double sum = 0.0;
  int32_t last = list.ids[0];
  for (int32_t i = 0; i < list.count; ++i) {
    if (list.weights[i] <= 0.0f) {
      continue;
    }
    sum += static_cast<double>(list.weights[i]);
    last = list.ids[i];
    if (sum > target) {
      break;
    }
  }
  return last;
}

}  // namespace moelora
