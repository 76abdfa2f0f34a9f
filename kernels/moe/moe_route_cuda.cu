// SPDX-License-Identifier: Apache-2.0
// moe_route on CUDA. Few rows (decode): one block, one launch. A warp takes the top-k of a row and finds its rank, how
// many rows come before it in the order of (slot, row). A row's experts are different ones, so an expert's pairs are a
// set of at most 64 ranks, one bit each: the position of a pair is a count of bits below its own, and so is the number
// of its segment among the first ranks of each run of one slot. What is left is one scan over the experts. Bits are set
// by integer atomics, which no order of theirs can change. Limited by latency: the logits, the rounds of the top-k, two
// barriers. More rows: router_topk and moe_sort.
#include <algorithm>
#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/moe/moe_route.h"
#include "kernels/moe/router_topk_row.cuh"

namespace moelora {
namespace {

constexpr int MAX_ROWS = 64;
constexpr int MAX_PAIRS = 512;
constexpr int MAX_EXPERTS = 256;
constexpr int MAX_WARPS = 32;
constexpr unsigned ALL = 0xffffffffu;

// Three counts of a run of experts in one word: pairs and segments up to 512, experts with pairs up to 256.
constexpr int COUNT_BITS = 10;
__device__ __forceinline__ int pairs_of(uint32_t counts) {
  return static_cast<int>(counts & ((1u << COUNT_BITS) - 1u));
}
__device__ __forceinline__ int segments_of(uint32_t counts) {
  return static_cast<int>(counts >> COUNT_BITS & ((1u << COUNT_BITS) - 1u));
}
__device__ __forceinline__ int active_of(uint32_t counts) {
  return static_cast<int>(counts >> (2 * COUNT_BITS));
}

struct Shared {
  RouterChoice choice[MAX_PAIRS];
  uint64_t heads[MAX_EXPERTS];  // of an expert's ranks the first of each run of one slot
  // Sets of ranks, bit i % 32 of word i / 32.
  uint32_t ranks[MAX_EXPERTS][2];  // of the rows that chose an expert
  uint32_t starts[2];              // at which another slot begins
  uint32_t before[MAX_EXPERTS];    // counts of lower experts of the same 32
  uint32_t total[MAX_EXPERTS / 32];
  int base_segments[MAX_EXPERTS / 32];
  int rank[MAX_ROWS];
  int slot[MAX_ROWS];
  int first_slot;  // of rank 0
};

__device__ __forceinline__ uint64_t rank_set(const uint32_t (&words)[2]) {
  return words[0] | static_cast<uint64_t>(words[1]) << 32;
}

// By each warp for its rows: top-k and rank.
template <int PER_LANE>
__device__ __forceinline__ void choose_rows(const MoeRouteArgs& args, const float* logits, Shared& s) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int rows = args.topk.num_rows;
  const int top_k = args.topk.top_k;
  int slot[2];  // of rows lane and lane + 32
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int other = lane + 32 * half;
    slot[half] = args.row_slot != nullptr && other < rows ? args.row_slot[other] : 0;
  }
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x) / 32; row < rows; row += static_cast<int>(blockDim.x) / 32) {
    RouterChoice* choice = s.choice + row * top_k;
    choose_experts<PER_LANE>(logits + row * args.topk.logits.stride, args.topk.num_experts, top_k, choice);
    const int own = __shfl_sync(ALL, row < 32 ? slot[0] : slot[1], row % 32);
    int rank = 0;
    unsigned same_before = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int other = lane + 32 * half;
      const unsigned same = __ballot_sync(ALL, other < row && slot[half] == own);
      rank += __popc(same) + __popc(__ballot_sync(ALL, other < rows && slot[half] < own));
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
                       static_cast<uint32_t>(__popcll(heads)) << COUNT_BITS |  //
                       (ranks != 0 ? 1u : 0u) << (2 * COUNT_BITS);
  uint32_t inclusive = own;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t lower = __shfl_up_sync(ALL, inclusive, offset);
    inclusive += lane >= offset ? lower : 0u;
  }
  const int base_segments = __popc(__ballot_sync(ALL, (ranks & base) != 0));
  s.heads[expert] = heads;
  s.before[expert] = inclusive - own;
  if (lane == 31) {
    s.total[expert / 32] = inclusive;
    s.base_segments[expert / 32] = base_segments;
  }
}

// Counts of all experts below 32 * groups, of GROUPS at most.
template <int GROUPS>
__device__ __forceinline__ uint32_t counts_below(const Shared& s, int groups) {
  uint32_t sum = 0;
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) {
    sum += group < groups ? s.total[group] : 0u;
  }
  return sum;
}

// By each warp, rows in the opposite order: the last warps do not scan.
template <int PER_LANE>
__device__ __forceinline__ void write_weights(const RouterTopkArgs& args, const float* logits, const Shared& s) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
#pragma unroll 1
  for (int row = warps - 1 - static_cast<int>(threadIdx.x) / 32; row < args.num_rows; row += warps) {
    const float weight = choice_weight<PER_LANE>(logits + row * args.logits.stride, args.num_experts, args.top_k,
                                                 args.renormalize, s.choice + row * args.top_k);
    if (lane < args.top_k) {
      args.weights[row * args.top_k + lane] = weight;
    }
  }
}

template <int GROUPS>
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

// As many warps as there are rows, up to 32, and more than there are groups of 32 experts, of which PER_LANE are
// enough.
template <int PER_LANE>
__global__ void __launch_bounds__(MAX_WARPS * 32, 1) route_kernel(const __grid_constant__ MoeRouteArgs args) {
  __shared__ Shared s;
  let_next_start();
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < 2 * args.topk.num_experts; i += static_cast<int>(blockDim.x)) {
    s.ranks[i / 2][i % 2] = 0;
  }
  if (threadIdx.x < 2) {
    s.starts[threadIdx.x] = 0;
  }
  __syncthreads();  // sets are empty
  wait_for_previous();
  const float* logits = static_cast<const float*>(args.topk.logits.data);
  choose_rows<PER_LANE>(args, logits, s);
  __syncthreads();  // sets are full
  scan_experts(args.topk.num_experts, s);
  write_weights<PER_LANE>(args.topk, logits, s);
  __syncthreads();  // counts are there
  write_order<PER_LANE>(args, s);
}

template <int PER_LANE>
void launch(const MoeRouteArgs& args, const CudaStream& state) {
  const int wanted = std::max(args.topk.num_rows, (args.topk.num_experts + 31) / 32 + 1);
  const auto threads = static_cast<unsigned>(32 * std::min(wanted, MAX_WARPS));
  launch_dependent(route_kernel<PER_LANE>, dim3(1), threads, 0, state, args);
}

}  // namespace

void moe_route_cuda(const MoeRouteArgs& args, Stream& stream) {
  const RouterTopkArgs& topk = args.topk;
  if (topk.num_rows > MAX_ROWS || int64_t{topk.num_rows} * topk.top_k > MAX_PAIRS || topk.num_experts > MAX_EXPERTS) {
    router_topk_cuda(topk, stream);
    return moe_sort_cuda(route_sort(args), stream);
  }
  MOELORA_ASSERT(topk.top_k >= 1 && topk.top_k <= topk.num_experts && topk.top_k <= kMaxTopK);
  MOELORA_ASSERT(topk.score == RouterScore::kSoftmax && topk.logits.dtype == Dtype::kF32);
  MOELORA_ASSERT(args.order.active_experts != nullptr && args.order.num_active != nullptr);
  if (topk.num_rows == 0) {
    return;
  }
  if (topk.num_experts <= 32) {
    launch<1>(args, cuda_state(stream));
  } else if (topk.num_experts <= 64) {
    launch<2>(args, cuda_state(stream));
  } else if (topk.num_experts <= 128) {
    launch<4>(args, cuda_state(stream));
  } else {
    launch<8>(args, cuda_state(stream));
  }
  check_launch("moe_route");
}

}  // namespace moelora
