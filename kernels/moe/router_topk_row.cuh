// SPDX-License-Identifier: Apache-2.0
// Top-k of one row by one warp. Lane i holds the experts i * PER_LANE and the following, sorted by falling logit; each
// of the K rounds finds the largest head of all lanes by one warp-wide integer reduction, and the lowest lane that has
// it gives its expert away. Keys are the bits of the logits in the order of the floats, so -inf and NaN (which loses to
// everything) need no special case. Sums of exponentials run in an order fixed by E. Limited by latency.
#pragma once

#include <cstdint>

namespace moelora {

constexpr int kMaxTopK = 32;

struct RouterChoice {
  uint32_t key;  // of its logit
  uint32_t expert;
};

// Unsigned integers in the order of the floats, above 0; -0 counts as 0, NaN as -inf.
__device__ __forceinline__ uint32_t ordered_key(float value) {
  const uint32_t bits = value != value ? 0xff800000u : __float_as_uint(value + 0.0f);
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}
__device__ __forceinline__ float key_logit(uint32_t key) {
  return __uint_as_float((key >> 31) != 0 ? key ^ 0x80000000u : ~key);
}
constexpr uint32_t kNanKey = 0xffffffffu;  // key_logit() of it is NaN

// The K best of a row in falling order, up to 32 * PER_LANE experts. `choice` is the warp's until its next barrier.
template <int PER_LANE>
__device__ __forceinline__ void choose_experts(const float* logits, int num_experts, int top_k, RouterChoice* choice) {
  constexpr unsigned kAll = 0xffffffffu;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t key[PER_LANE];  // 0: no expert
  int expert[PER_LANE];
  bool nan = false;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    expert[i] = lane * PER_LANE + i;
    const float value = expert[i] < num_experts ? logits[expert[i]] : 0.0f;
    key[i] = expert[i] < num_experts ? ordered_key(value) : 0u;
    nan = nan || value != value;
  }
  nan = __any_sync(kAll, nan);
#pragma unroll
  for (int pass = 0; pass < PER_LANE; ++pass) {  // neighbours change places, equal ones do not
#pragma unroll
    for (int i = pass % 2; i + 1 < PER_LANE; i += 2) {
      const bool swap = key[i + 1] > key[i];
      const uint32_t low = swap ? key[i] : key[i + 1];
      const int low_expert = swap ? expert[i] : expert[i + 1];
      key[i] = swap ? key[i + 1] : key[i];
      expert[i] = swap ? expert[i + 1] : expert[i];
      key[i + 1] = low;
      expert[i + 1] = low_expert;
    }
  }
  const unsigned lower_lanes = (1u << lane) - 1u;
#pragma unroll 1
  for (int j = 0; j < top_k; ++j) {
    const uint32_t best = __reduce_max_sync(kAll, key[0]);
    const unsigned equal = __ballot_sync(kAll, key[0] == best);
    if (key[0] == best && (equal & lower_lanes) == 0) {
      // A poisoned row must reach the sampler as NaN, whichever experts it lost.
      choice[j] = {nan ? kNanKey : best, static_cast<uint32_t>(expert[0])};
#pragma unroll
      for (int i = 0; i + 1 < PER_LANE; ++i) {
        key[i] = key[i + 1];
        expert[i] = expert[i + 1];
      }
      key[PER_LANE - 1] = 0u;
    }
  }
  __syncwarp();  // choices are there for the warp
}

// Of a row that choose_experts() has done: lane j gets the weight of choice j.
template <int PER_LANE>
__device__ __forceinline__ float choice_weight(const float* logits, int num_experts, int top_k, bool renormalize,
                                               const RouterChoice* choice) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float largest = key_logit(choice[0].key);
  const float mine = lane < top_k ? expf(key_logit(choice[lane].key) - largest) : 0.0f;
  float sum = mine;
  if (!renormalize) {
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      sum += lane + 32 * i < num_experts ? expf(logits[lane + 32 * i] - largest) : 0.0f;
    }
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
  return mine / sum;
}

}  // namespace moelora
