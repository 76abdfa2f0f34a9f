// SPDX-License-Identifier: Apache-2.0
// moe_sort: orders the T * K (row, choice) pairs by (expert, adapter slot, row), stably, once per layer; the base
// GEMMs and the LoRA of gate_up and down share that order.
#pragma once

#include "kernels/base/host_device.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor.h"

namespace moelora {

// Most pairs that moe_sort_cuda takes.
constexpr int64_t kMaxSortedPairsCuda = 65536;

// Arrays for up to T * K pairs; device memory of the workspace. P = T * K.
struct MoeOrder {
  int32_t* pair_row = nullptr;       // [P] row t of sorted pair i
  int32_t* pair_position = nullptr;  // [P] sorted position of pair t * K + j
  int32_t* expert_begin = nullptr;   // [E + 1] pairs of expert e
  // Segments: maximal runs of one expert and one slot, in order; slot 0 included.
  int32_t* segment_begin = nullptr;   // [P + 1]
  int32_t* segment_expert = nullptr;  // [P]
  int32_t* segment_slot = nullptr;    // [P]
  int32_t* num_segments = nullptr;    // [1]
  // Experts with at least one pair, ascending. CUDA kernels need both; null: not wanted (CPU).
  int32_t* active_experts = nullptr;  // [E]
  int32_t* num_active = nullptr;      // [1]
  // Running sums over all calls, for stats: active experts, segments of slots > 0. Wrap around. Null: not wanted.
  uint32_t* totals = nullptr;  // [2]
};

// The expert that owns a sorted position, given expert_begin: the last one that begins at or before it.
MOELORA_HD inline int32_t expert_at(const int32_t* expert_begin, int32_t num_experts, int32_t position) {
  int32_t low = 0;
  int32_t high = num_experts;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (expert_begin[middle] <= position ? low : high) = middle;
  }
  return low;
}

struct MoeSortArgs {
  const int32_t* ids = nullptr;       // [T, K] expert of each choice
  const int32_t* row_slot = nullptr;  // [T] or null = all base
  int32_t num_rows = 0;
  int32_t top_k = 0;
  int32_t num_experts = 0;
  MoeOrder order;
};

void moe_sort_cpu(const MoeSortArgs& args, Stream& stream);
void moe_sort_cuda(const MoeSortArgs& args, Stream& stream);

}  // namespace moelora
