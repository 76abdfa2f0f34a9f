// SPDX-License-Identifier: Apache-2.0
// From the logits of few rows to the order in which the experts take their pairs, by one block. A warp takes the top-k
// of a row and finds its rank, how many rows come before it in the order of (slot, row). A row's experts are different
// ones, so an expert's pairs are a set of at most 64 ranks, one bit each: the position of a pair is a count of bits
// below its own, and so is the number of its segment among the first ranks of each run of one slot. What is left is one
// scan over the experts. Bits are set by integer atomics, which no order of theirs can change. Of one row a warp knows
// everything: no barrier. Limited by latency: the rounds of the top-k, two barriers.
#pragma once

#include <cstdint>

#include "kernels/moe/moe_route.h"
#include "kernels/moe/router_topk_row.cuh"

namespace moelora::route {

constexpr int kMaxRows = 64;
constexpr int kMaxPairs = 512;
constexpr int kMaxExperts = 256;
constexpr unsigned kAll = 0xffffffffu;

// Three counts of a run of experts in one word: pairs and segments up to 512, experts with pairs up to 256.
constexpr int kCountBits = 10;
__device__ __forceinline__ int pairs_of(uint32_t counts) {
  return static_cast<int>(counts & ((1u << kCountBits) - 1u));
}
__device__ __forceinline__ int segments_of(uint32_t counts) {
  return static_cast<int>(counts >> kCountBits & ((1u << kCountBits) - 1u));
}
__device__ __forceinline__ int active_of(uint32_t counts) {
  return static_cast<int>(counts >> (2 * kCountBits));
}

// For up to ROWS rows, PAIRS pairs and EXPERTS experts.
template <int ROWS, int PAIRS, int EXPERTS>
struct Shared {
  static_assert(ROWS <= kMaxRows && PAIRS <= kMaxPairs && EXPERTS <= kMaxExperts && EXPERTS % 32 == 0);
  RouterChoice choice[PAIRS];
  uint64_t heads[EXPERTS];  // of an expert's ranks the first of each run of one slot
  // Sets of ranks, bit i % 32 of word i / 32.
  uint32_t ranks[EXPERTS][2];  // of the rows that chose an expert
  uint32_t starts[2];          // at which another slot begins
  uint32_t before[EXPERTS];    // counts of lower experts of the same 32
  uint32_t total[EXPERTS / 32];
  int base_segments[EXPERTS / 32];
  int rank[ROWS];
  int slot[ROWS];
  int first_slot;  // of rank 0
};

// Rows of logits, wherever they are.
struct Logits {
  const float* rows;
  int64_t stride;
  __device__ __forceinline__ const float* row(int index) const { return rows + index * stride; }
};

// Slots of the rows that a lane of every warp holds: row lane + 32 i is of[i]. They are there since the step began.
struct Slots {
  int of[2];
  __device__ __forceinline__ explicit Slots(const MoeRouteArgs& args) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = static_cast<int>(threadIdx.x) % 32 + 32 * half;
      of[half] = args.row_slot != nullptr && row < args.topk.num_rows ? args.row_slot[row] : 0;
    }
  }
};

__device__ __forceinline__ uint64_t rank_set(const uint32_t (&words)[2]) {
  return words[0] | static_cast<uint64_t>(words[1]) << 32;
}

// By each warp for its rows: top-k and rank.
template <int PER_LANE, class Shared>
__device__ __forceinline__ void choose_rows(const MoeRouteArgs& args, const Logits& logits, const Slots& slots,
                                            Shared& s) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int rows = args.topk.num_rows;
  const int top_k = args.topk.top_k;
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x) / 32; row < rows; row += static_cast<int>(blockDim.x) / 32) {
    RouterChoice* choice = s.choice + row * top_k;
    choose_experts<PER_LANE>(logits.row(row), args.topk.num_experts, top_k, choice);
    const int own = __shfl_sync(kAll, row < 32 ? slots.of[0] : slots.of[1], row % 32);
    int rank = 0;
    unsigned same_before = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int other = lane + 32 * half;
      const unsigned same = __ballot_sync(kAll, other < row && slots.of[half] == own);
      rank += __popc(same) + __popc(__ballot_sync(kAll, other < rows && slots.of[half] < own));
      same_before |= same;
    }
    const uint32_t bit = 1u << (rank % 32);
    if (lane < top_k) {
      atomicOr(&s.ranks[choice[lane].expert][rank / 32], bit);
    }
    if (lane == 0) {
      s.rank[row] = rank;
      s.slot[row] = own;
      if (rank == 0) {
        s.first_slot = own;
      }
      if (same_before == 0) {
        atomicOr(&s.starts[rank / 32], bit);
      }
    }
  }
}

// The lowest of `ranks` in each of the runs that begin at `starts`, of which bit 0 is one. Subtracting 1 at the start
// of a run changes its bits up to the lowest and borrows from the next run if it has none: every other run is done at a
// time, with all bits set in those between, which lend.
__device__ __forceinline__ uint64_t heads_of(uint64_t ranks, uint64_t starts) {
  uint64_t odd = starts;  // bit i: whether an odd number of runs begin up to it
#pragma unroll
  for (int shift = 1; shift < 64; shift *= 2) {
    odd ^= odd << shift;
  }
  const uint64_t in_odd = ranks & odd;
  const uint64_t in_even = ranks & ~odd;
  return (in_odd & ~((in_odd | ~odd) - (starts & odd))) | (in_even & ~((in_even | odd) - (starts & ~odd)));
}

// By the first warps, a thread an expert: heads and counts.
template <class Shared>
__device__ __forceinline__ void scan_experts(int num_experts, Shared& s) {
  const int expert = static_cast<int>(threadIdx.x);
  const int lane = expert % 32;
  if (expert - lane >= num_experts) {
    return;
  }
  const uint64_t ranks = expert < num_experts ? rank_set(s.ranks[expert]) : 0;
  const uint64_t starts = rank_set(s.starts);
  const uint64_t heads = heads_of(ranks, starts);
  const uint64_t later = starts & (starts - 1);                                // all but rank 0
  const uint64_t base = s.first_slot == 0 ? (later & (~later + 1)) - 1 : 0;    // ranks without an adapter
  const uint32_t own = static_cast<uint32_t>(__popcll(ranks)) |                //
                       static_cast<uint32_t>(__popcll(heads)) << kCountBits |  //
                       (ranks != 0 ? 1u : 0u) << (2 * kCountBits);
  uint32_t inclusive = own;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t lower = __shfl_up_sync(kAll, inclusive, offset);
    inclusive += lane >= offset ? lower : 0u;
  }
  const int base_segments = __popc(__ballot_sync(kAll, (ranks & base) != 0));
  s.heads[expert] = heads;
  s.before[expert] = inclusive - own;
  if (lane == 31) {
    s.total[expert / 32] = inclusive;
    s.base_segments[expert / 32] = base_segments;
  }
}

// Counts of all experts below 32 * groups, of GROUPS at most.
template <int GROUPS, class Shared>
__device__ __forceinline__ uint32_t counts_below(const Shared& s, int groups) {
  uint32_t sum = 0;
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) {
    sum += group < groups ? s.total[group] : 0u;
  }
  return sum;
}

// By each warp, rows in the opposite order: the last warps do not scan.
template <int PER_LANE, class Shared>
__device__ __forceinline__ void write_weights(const RouterTopkArgs& args, const Logits& logits, const Shared& s) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
#pragma unroll 1
  for (int row = warps - 1 - static_cast<int>(threadIdx.x) / 32; row < args.num_rows; row += warps) {
    const float weight = choice_weight<PER_LANE>(logits.row(row), args.num_experts, args.top_k, args.renormalize,
                                                 s.choice + row * args.top_k);
    if (lane < args.top_k) {
      args.weights[row * args.top_k + lane] = weight;
    }
  }
}

template <int GROUPS, class Shared>
__device__ __forceinline__ void write_order(const MoeRouteArgs& args, const Shared& s) {
  const MoeOrder& order = args.order;
  const int pairs = args.topk.num_rows * args.topk.top_k;
#pragma unroll 1
  for (int pair = static_cast<int>(threadIdx.x); pair < pairs; pair += static_cast<int>(blockDim.x)) {
    const int row = pair / args.topk.top_k;
    const auto expert = static_cast<int>(s.choice[pair].expert);
    const int rank = s.rank[row];
    const uint64_t below = (uint64_t{1} << rank) - 1;
    const uint64_t heads = s.heads[expert];
    const uint32_t before = s.before[expert] + counts_below<GROUPS - 1>(s, expert / 32);
    const int position = pairs_of(before) + __popcll(rank_set(s.ranks[expert]) & below);
    args.topk.ids[pair] = expert;
    order.pair_row[position] = row;
    order.pair_position[pair] = position;
    if ((heads >> rank & 1) != 0) {
      const int segment = segments_of(before) + __popcll(heads & below);
      order.segment_begin[segment] = position;
      order.segment_expert[segment] = expert;
      order.segment_slot[segment] = s.slot[row];
    }
  }
  const int expert = static_cast<int>(threadIdx.x);
  const int num_experts = args.topk.num_experts;
  if (expert < num_experts) {
    const uint32_t before = s.before[expert] + counts_below<GROUPS - 1>(s, expert / 32);
    order.expert_begin[expert] = pairs_of(before);
    if (rank_set(s.ranks[expert]) != 0) {
      order.active_experts[active_of(before)] = expert;
    }
  }
  if (threadIdx.x == blockDim.x - 1) {
    const int groups = (num_experts + 31) / 32;
    const uint32_t all = counts_below<GROUPS>(s, groups);
    int base_segments = 0;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      base_segments += group < groups ? s.base_segments[group] : 0;
    }
    order.expert_begin[num_experts] = pairs;
    *order.num_active = active_of(all);
    *order.num_segments = segments_of(all);
    order.segment_begin[segments_of(all)] = pairs;
    if (order.totals != nullptr) {  // adding without reading leaves nothing to wait for
      atomicAdd(order.totals, static_cast<uint32_t>(active_of(all)));
      atomicAdd(order.totals + 1, static_cast<uint32_t>(segments_of(all) - base_segments));
    }
  }
}

// Before any warp routes, by the whole block, which needs a barrier afterwards.
template <class Shared>
__device__ __forceinline__ void clear_sets(int num_experts, Shared& s) {
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < 2 * num_experts; i += static_cast<int>(blockDim.x)) {
    s.ranks[i / 2][i % 2] = 0;
  }
  if (threadIdx.x < 2) {
    s.starts[threadIdx.x] = 0;
  }
}

// By a block of more warps than there are groups of 32 experts, of which PER_LANE are enough; sets are empty.
template <int PER_LANE, class Shared>
__device__ __forceinline__ void route_rows(const MoeRouteArgs& args, const Logits& logits, const Slots& slots,
                                           Shared& s) {
  choose_rows<PER_LANE>(args, logits, slots, s);
  __syncthreads();  // sets are full
  scan_experts(args.topk.num_experts, s);
  write_weights<PER_LANE>(args.topk, logits, s);
  __syncthreads();  // counts are there
  write_order<PER_LANE>(args, s);
}

// The same of one row by one warp: each of its experts has one pair, which is a segment.
template <int PER_LANE>
__device__ __forceinline__ void route_one_row(const MoeRouteArgs& args, const Logits& logits, const Slots& slots,
                                              RouterChoice* choice) {
  const RouterTopkArgs& topk = args.topk;
  const MoeOrder& order = args.order;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int slot = __shfl_sync(kAll, slots.of[0], 0);
  choose_experts<PER_LANE>(logits.rows, topk.num_experts, topk.top_k, choice);
  const bool chooses = lane < topk.top_k;
  const int expert = chooses ? static_cast<int>(choice[lane].expert) : 0;
  unsigned chosen[PER_LANE];  // bit i of word g: expert 32 g + i
#pragma unroll
  for (int group = 0; group < PER_LANE; ++group) {
    chosen[group] = __reduce_or_sync(kAll, chooses && expert / 32 == group ? 1u << (expert % 32) : 0u);
  }
  const auto chosen_below = [&](int end) {
    int count = 0;
#pragma unroll
    for (int group = 0; group < PER_LANE; ++group) {
      const unsigned below = group < end / 32 ? kAll : (group == end / 32 ? (1u << (end % 32)) - 1u : 0u);
      count += __popc(chosen[group] & below);
    }
    return count;
  };
  if (chooses) {
    const int position = chosen_below(expert);
    topk.ids[lane] = expert;
    order.pair_row[position] = 0;
    order.pair_position[lane] = position;
    order.segment_begin[position] = position;
    order.segment_expert[position] = expert;
    order.segment_slot[position] = slot;
    order.active_experts[position] = expert;
  }
#pragma unroll
  for (int group = 0; group < PER_LANE; ++group) {
    const int other = 32 * group + lane;
    if (other < topk.num_experts) {
      order.expert_begin[other] = chosen_below(other);
    }
  }
  if (lane == 0) {
    order.expert_begin[topk.num_experts] = topk.top_k;
    order.segment_begin[topk.top_k] = topk.top_k;
    *order.num_active = topk.top_k;
    *order.num_segments = topk.top_k;
    if (order.totals != nullptr) {
      atomicAdd(order.totals, static_cast<uint32_t>(topk.top_k));
      atomicAdd(order.totals + 1, static_cast<uint32_t>(slot == 0 ? 0 : topk.top_k));
    }
  }
  const float weight = choice_weight<PER_LANE>(logits.rows, topk.num_experts, topk.top_k, topk.renormalize, choice);
  if (chooses) {
    topk.weights[lane] = weight;
  }
}

}  // namespace moelora::route
