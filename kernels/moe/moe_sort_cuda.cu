// SPDX-License-Identifier: Apache-2.0
// moe_sort on CUDA: one block, one launch. Rows are brought into order of (slot, row) by a stable radix sort, skipped
// where they already are, which is nearly always; then one stable counting sort by expert places their pairs. In a
// counting sort each warp owns a run of items and a row of counters in shared memory; items of one warp and one key get
// their ranks by matching lanes, so nothing depends on timing. Segments are the heads of runs in the sorted order,
// numbered by a scan. Up to 512 pairs (decode) each thread has one item and sorted slots stay in shared memory: limited
// by the latency of a few barriers. More pairs: kernels/moe/moe_sort_many.cuh.
// H200, between two events: 4 pairs 7.2 us, 256 pairs 7.3 (9.0 with slots out of order).
#include <cstdint>

#include "kernels/cuda/block_scan.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/moe/moe_sort.h"
#include "kernels/moe/moe_sort_many.cuh"

namespace moelora {
namespace {

constexpr int MAX_EXPERTS = 512;
constexpr int SMALL_PAIRS = 512;
constexpr int DIGIT_BITS = 8;  // of a slot, sorted by in one pass
constexpr unsigned ALL = 0xffffffffu;

template <int WARPS>
struct Shared {
  // While counting: items of each key in the warp's run; afterwards: of the key in runs before it and already placed.
  uint16_t before[WARPS][MAX_EXPERTS];
  int begin[MAX_EXPERTS + 4];  // items of lower keys; a multiple of 16 bytes, so that no wide load spans two arrays
  uint32_t warp_sum[WARPS];
  int32_t slot_at[SMALL_PAIRS];      // of sorted position
  unsigned heads[SMALL_PAIRS / 32];  // bit i % 32 of word i / 32: position i begins a segment
};

// The items [begin, end) of this warp, a multiple of 32 but for the last.
struct Run {
  int begin;
  int end;
};
template <int WARPS>
__device__ __forceinline__ Run warp_run(int count) {
  const int length = (count + WARPS * 32 - 1) / (WARPS * 32) * 32;
  const int begin = static_cast<int>(threadIdx.x / 32) * length;
  return {begin, begin + length < count ? begin + length : count};
}

// Key of this lane's item of those from `base` on; -1 beyond the run.
template <class Key>
__device__ __forceinline__ int load_key(const Run& run, int base, const Key& key_of) {
  const int item = base + static_cast<int>(threadIdx.x % 32);
  return item < run.end ? key_of(item) : -1;
}

// Counts keys and prepares their places. Returns the number of keys below the thread's own (key = threadIdx.x) that
// occur, `own` = how often its own does, `active` = how many keys occur at all. Ends with a barrier.
template <int WARPS, class Key>
__device__ __forceinline__ int count_keys(Shared<WARPS>& s, int count, int num_keys, const Key& key_of, int* own,
                                          int* active) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  for (int key = lane; key < num_keys; key += 32) {
    s.before[warp][key] = 0;
  }
  __syncwarp();
  const Run run = warp_run<WARPS>(count);
  for (int base = run.begin; base < run.end; base += 32) {
    const int key = load_key(run, base, key_of);
    const unsigned peers = __match_any_sync(ALL, key);
    if (key >= 0 && lane == __ffs(static_cast<int>(peers)) - 1) {
      s.before[warp][key] += static_cast<uint16_t>(__popc(peers));
    }
    __syncwarp();
  }
  __syncthreads();  // all counts are there
  const int key = threadIdx.x;
  uint32_t sum = 0;
  if (key < num_keys) {
#pragma unroll 16
    for (int w = 0; w < WARPS; ++w) {
      const uint32_t here = s.before[w][key];
      s.before[w][key] = static_cast<uint16_t>(sum);
      sum += here;
    }
  }
  // Two sums in one: items up to 2^16 in the low 20 bits, keys that occur above.
  uint32_t total;
  const uint32_t lower = block_exclusive_sum<WARPS>(sum | (sum > 0 ? 1u << 20 : 0u), s.warp_sum, &total);
  if (key < num_keys) {
    s.begin[key] = static_cast<int>(lower & 0xfffffu);
  }
  if (key == 0) {
    s.begin[num_keys] = count;
  }
  __syncthreads();  // begin is there
  *own = static_cast<int>(sum);
  *active = static_cast<int>(total >> 20);
  return static_cast<int>(lower >> 20);
}

// Calls emit(item, position) for every item, positions by (key, item). Ends with a barrier.
template <int WARPS, class Key, class Emit>
__device__ __forceinline__ void place_items(Shared<WARPS>& s, int count, const Key& key_of, const Emit& emit) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const Run run = warp_run<WARPS>(count);
  for (int base = run.begin; base < run.end; base += 32) {
    const int key = load_key(run, base, key_of);
    const unsigned peers = __match_any_sync(ALL, key);
    const int rank = __popc(peers & ((1u << lane) - 1u));
    const int position = key >= 0 ? s.begin[key] + s.before[warp][key] + rank : 0;
    __syncwarp();
    if (key >= 0 && rank == 0) {
      s.before[warp][key] += static_cast<uint16_t>(__popc(peers));
    }
    __syncwarp();
    if (key >= 0) {
      emit(base + lane, position);
    }
  }
  __syncthreads();  // what was emitted is there
}

// Row numbers in order of (slot, row); null: the rows already are. Uses segment_expert and segment_slot, which are
// written last of all.
template <int WARPS>
__device__ __forceinline__ const int32_t* order_rows(const MoeSortArgs& args, Shared<WARPS>& s) {
  if (args.row_slot == nullptr) {
    return nullptr;
  }
  const int32_t* slot = args.row_slot;
  bool unsorted = false;
  unsigned bits = 0;
  for (int t = threadIdx.x; t < args.num_rows; t += WARPS * 32) {
    bits |= static_cast<unsigned>(slot[t]);
    unsorted = unsorted || (t > 0 && slot[t - 1] > slot[t]);
  }
  if (__syncthreads_or(unsorted ? 1 : 0) == 0) {
    return nullptr;
  }
  const int32_t* from = nullptr;
  int32_t* to = args.order.segment_expert;
  for (int shift = 0; shift < 32; shift += DIGIT_BITS) {
    if (__syncthreads_or((bits >> shift) != 0 ? 1 : 0) == 0) {
      break;
    }
    const auto row_at = [from](int i) { return from != nullptr ? from[i] : i; };
    const auto digit = [&](int i) { return (slot[row_at(i)] >> shift) & ((1 << DIGIT_BITS) - 1); };
    int own;
    int active;
    count_keys(s, args.num_rows, 1 << DIGIT_BITS, digit, &own, &active);
    place_items(s, args.num_rows, digit, [&](int i, int position) { to[position] = row_at(i); });
    from = to;
    to = to == args.order.segment_expert ? args.order.segment_slot : args.order.segment_expert;
  }
  return from;
}

// Marks the heads of segments of the warp's run in s.heads; counts them, and those of slots above 0.
template <int WARPS, class Slot>
__device__ __forceinline__ void mark_heads(Shared<WARPS>& s, const Run& run, int num_experts, const Slot& slot_at,
                                           uint32_t* found, uint32_t* adapted) {
  const int lane = threadIdx.x % 32;
  int last = run.begin > 0 && run.begin < run.end ? slot_at(run.begin - 1) : 0;  // slot of the position before
  for (int base = run.begin; base < run.end; base += 32) {
    const int slot = load_key(run, base, slot_at);
    const int position = base + lane;
    const int left = __shfl_up_sync(ALL, slot, 1);
    const int before = lane == 0 ? last : left;
    last = __shfl_sync(ALL, slot, 31);
    const bool head =
        position < run.end && (slot != before || position == s.begin[expert_at(s.begin, num_experts, position)]);
    const unsigned heads = __ballot_sync(ALL, head);
    *found += static_cast<uint32_t>(__popc(heads));
    *adapted += static_cast<uint32_t>(__popc(__ballot_sync(ALL, head && slot > 0)));
    if (lane == 0) {
      s.heads[base / 32] = heads;
    }
  }
  __syncwarp();
}

template <int WARPS>
__device__ __forceinline__ void find_segments(const MoeSortArgs& args, Shared<WARPS>& s, int pairs) {
  const MoeOrder& order = args.order;
  const int lane = threadIdx.x % 32;
  const Run run = warp_run<WARPS>(pairs);
  const auto slot_at = [&](int position) { return s.slot_at[position]; };
  uint32_t found = 0;
  uint32_t adapted = 0;
  mark_heads(s, run, args.num_experts, slot_at, &found, &adapted);
  uint32_t total;
  uint32_t total_adapted;
  const uint32_t lower = block_exclusive_sum<WARPS>(lane == 0 ? found : 0u, s.warp_sum, &total);
  __syncthreads();  // warp_sum is read
  block_exclusive_sum<WARPS>(lane == 0 ? adapted : 0u, s.warp_sum, &total_adapted);
  auto next = static_cast<int>(__shfl_sync(ALL, lower, 0));
  for (int base = run.begin; base < run.end; base += 32) {
    const unsigned heads = s.heads[base / 32];
    if ((heads >> lane & 1u) != 0) {
      const int position = base + lane;
      const int segment = next + __popc(heads & ((1u << lane) - 1u));
      order.segment_begin[segment] = position;
      order.segment_expert[segment] = expert_at(s.begin, args.num_experts, position);
      order.segment_slot[segment] = slot_at(position);
    }
    next += __popc(heads);
  }
  if (threadIdx.x == 0) {
    order.segment_begin[total] = pairs;
    *order.num_segments = static_cast<int32_t>(total);
    if (order.totals != nullptr) {
      order.totals[1] += total_adapted;
    }
  }
}

template <int WARPS>
__global__ void __launch_bounds__(WARPS * 32, 1) sort_kernel(const MoeSortArgs args) {
  static_assert(WARPS * 32 >= MAX_EXPERTS && MAX_EXPERTS >= 1 << DIGIT_BITS);
  __shared__ Shared<WARPS> s;
  let_next_start();
  wait_for_previous();
  const MoeOrder& order = args.order;
  const int pairs = args.num_rows * args.top_k;
  const int32_t* rows = order_rows(args, s);
  // Item i: choice i % K of the row that comes i / K-th.
  const auto row_of = [&](int i) { return rows != nullptr ? rows[i / args.top_k] : i / args.top_k; };
  const auto expert_of = [&](int i) { return args.ids[row_of(i) * args.top_k + i % args.top_k]; };
  int own;
  int active;
  const int lower = count_keys(s, pairs, args.num_experts, expert_of, &own, &active);
  const int expert = threadIdx.x;
  if (expert < args.num_experts) {
    order.expert_begin[expert] = s.begin[expert];
    if (own > 0) {
      order.active_experts[lower] = expert;
    }
  }
  if (expert == 0) {
    order.expert_begin[args.num_experts] = pairs;
    *order.num_active = active;
    if (order.totals != nullptr) {
      order.totals[0] += static_cast<uint32_t>(active);
    }
  }
  place_items(s, pairs, expert_of, [&](int i, int position) {
    const int row = row_of(i);
    order.pair_row[position] = row;
    order.pair_position[row * args.top_k + i % args.top_k] = position;
    s.slot_at[position] = args.row_slot != nullptr ? args.row_slot[row] : 0;
  });
  find_segments(args, s, pairs);
}

}  // namespace

void moe_sort_cuda(const MoeSortArgs& args, Stream& stream) {
  const int64_t pairs = int64_t{args.num_rows} * args.top_k;
  MOELORA_ASSERT(args.num_experts >= 1 && args.num_experts <= MAX_EXPERTS && pairs <= kMaxSortedPairsCuda);
  MOELORA_ASSERT(args.order.active_experts != nullptr && args.order.num_active != nullptr);
  if (args.num_rows == 0) {
    return;
  }
  if (pairs <= SMALL_PAIRS) {
    launch_dependent(sort_kernel<16>, dim3(1), 16 * 32, 0, cuda_state(stream), args);
  } else {
    sort_many::launch(args, cuda_state(stream));
  }
  check_launch("moe_sort");
}

}  // namespace moelora
