// SPDX-License-Identifier: Apache-2.0
// moe_sort of many pairs: the blocks of one cluster, on GPUs that have clusters, else one block. The order is that of
// moe_sort_cuda.cu: a stable radix sort of the rows by slot where they are out of order, then one stable counting sort
// of their pairs by expert. In a counting sort each warp owns a run of items and a row of counters in its block's
// shared memory; blocks read each other's totals there (distributed shared memory), so that every block knows where its
// items of every key begin. Items of one warp and one key get their ranks by matching lanes: nothing depends on timing.
// Whether rows are in order is found while their pairs are counted as if they were. Segments are the heads of runs in
// the sorted order, numbered by a scan over the cluster.
// Limited by the latency of a few barriers, for very many pairs by the SMs' throughput. Included by moe_sort_cuda.cu.
#pragma once

#include <cstdint>

#include "kernels/cuda/block_scan.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/moe/moe_sort.h"

namespace moelora::sort_many {

constexpr int kClusterBlocks = 8;  // the most that every GPU with clusters can place
constexpr int kWarps = 32;         // of a block
constexpr int kThreads = 32 * kWarps;
constexpr int kMaxKeys = 512;
constexpr int kMaxPairs = static_cast<int>(kMaxSortedPairsCuda);
constexpr int kDigitBits = 8;  // of a slot, sorted by in one pass
constexpr int kBatch = 4;      // groups of 32 items whose keys a warp loads at once
constexpr unsigned kAll = 0xffffffffu;

// --- Blocks of a cluster; with BLOCKS == 1 there is none.

template <int BLOCKS>
__device__ __forceinline__ int block_rank() {
  return BLOCKS == 1 ? 0 : static_cast<int>(blockIdx.x);  // the grid is one cluster
}
// All threads of all blocks; what they wrote before it is visible after it.
template <int BLOCKS>
__device__ __forceinline__ void cluster_sync() {
  if constexpr (BLOCKS > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
}
// `value` in the shared memory of block `rank`.
template <int BLOCKS>
__device__ __forceinline__ uint32_t load_from(const uint32_t* value, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (BLOCKS > 1) {
    const auto own = static_cast<uint32_t>(__cvta_generic_to_shared(value));
    uint32_t address;
    uint32_t result;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(own), "r"(rank));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(result) : "r"(address) : "memory");
    return result;
  }
#endif
  return *value;
}

template <int BLOCKS>
struct Shared {
  // While counting: items of each key in the warp's run; afterwards: of the key in the block's runs before it and
  // already placed.
  uint16_t before[kWarps][kMaxKeys];
  int begin[kMaxKeys + 4];         // items of lower keys
  int own_begin[kMaxKeys];         // where this block's items of a key begin
  uint32_t block_count[kMaxKeys];  // this block's items of a key; read by other blocks
  uint32_t unsorted;               // this block found slots out of order; read by other blocks
  uint32_t found[2];               // heads of segments in this block's runs, and those of adapters; read by others
  uint32_t warp_sum[kWarps];
  // Of the block's runs: bit i % 32 of word i / 32 = position i begins an expert, then a segment.
  unsigned heads[kMaxPairs / 32 / BLOCKS];
};

// The items [begin, end) of this warp, a multiple of 32 but for the last. Warps of lower blocks come first.
struct Run {
  int begin;
  int end;
};
template <int BLOCKS>
__device__ __forceinline__ int run_length(int count) {
  return (count + BLOCKS * kThreads - 1) / (BLOCKS * kThreads) * 32;
}
template <int BLOCKS>
__device__ __forceinline__ Run warp_run(int count) {
  const int length = run_length<BLOCKS>(count);
  const int begin = min((block_rank<BLOCKS>() * kWarps + static_cast<int>(threadIdx.x / 32)) * length, count);
  return {begin, min(begin + length, count)};
}

// Keys of the items base + lane, base + 32 + lane, ... of a run; -1 beyond it.
template <class Key>
__device__ __forceinline__ void load_keys(const Run& run, int base, const Key& key_of, int (&keys)[kBatch]) {
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    const int item = base + 32 * b + static_cast<int>(threadIdx.x % 32);
    keys[b] = item < run.end ? key_of(item) : -1;
  }
}

// The block's part of counting keys: s.before and s.block_count. The caller synchronises the cluster next.
template <int BLOCKS, class Key>
__device__ __forceinline__ void count_in_block(Shared<BLOCKS>& s, int count, int num_keys, const Key& key_of) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const Run run = warp_run<BLOCKS>(count);
  for (int key = lane; key < num_keys; key += 32) {
    s.before[warp][key] = 0;
  }
  __syncwarp();
  for (int base = run.begin; base < run.end; base += 32 * kBatch) {
    int keys[kBatch];
    load_keys(run, base, key_of, keys);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (base + 32 * b < run.end) {
        const unsigned peers = __match_any_sync(kAll, keys[b]);
        if (keys[b] >= 0 && lane == __ffs(static_cast<int>(peers)) - 1) {
          s.before[warp][keys[b]] += static_cast<uint16_t>(__popc(peers));
        }
        __syncwarp();
      }
    }
  }
  __syncthreads();  // all counts are there
  const int key = static_cast<int>(threadIdx.x);
  if (key < num_keys) {
    uint32_t sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const uint32_t here = s.before[w][key];
      s.before[w][key] = static_cast<uint16_t>(sum);
      sum += here;
    }
    s.block_count[key] = sum;
  }
}

// After the cluster's barrier: s.begin and s.own_begin. Returns the number of keys below the thread's own (key =
// threadIdx.x) that occur, `own` = how often its own does in all blocks, `active` = how many keys occur at all. Ends
// with a barrier of the block.
template <int BLOCKS>
__device__ __forceinline__ int add_blocks(Shared<BLOCKS>& s, int count, int num_keys, int* own, int* active) {
  const int key = static_cast<int>(threadIdx.x);
  uint32_t sum = 0;
  uint32_t lower_blocks = 0;
  if (key < num_keys) {
    uint32_t counts[BLOCKS];
#pragma unroll
    for (int rank = 0; rank < BLOCKS; ++rank) {
      counts[rank] = load_from<BLOCKS>(&s.block_count[key], rank);
    }
#pragma unroll
    for (int rank = 0; rank < BLOCKS; ++rank) {
      lower_blocks += rank < block_rank<BLOCKS>() ? counts[rank] : 0u;
      sum += counts[rank];
    }
  }
  // Two sums in one: items up to 2^16 in the low 20 bits, keys that occur above.
  uint32_t total;
  const uint32_t lower = block_exclusive_sum<kWarps>(sum | (sum > 0 ? 1u << 20 : 0u), s.warp_sum, &total);
  if (key < num_keys) {
    const uint32_t begin = lower & 0xfffffu;
    s.begin[key] = static_cast<int>(begin);
    s.own_begin[key] = static_cast<int>(begin + lower_blocks);
  }
  if (key == 0) {
    s.begin[num_keys] = count;
  }
  __syncthreads();  // begins are there
  *own = static_cast<int>(sum);
  *active = static_cast<int>(total >> 20);
  return static_cast<int>(lower >> 20);
}

// Calls emit(item, position) for every item of the block, positions by (key, item). Ends with a barrier of the cluster.
template <int BLOCKS, class Key, class Emit>
__device__ __forceinline__ void place_items(Shared<BLOCKS>& s, int count, const Key& key_of, const Emit& emit) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const Run run = warp_run<BLOCKS>(count);
  for (int base = run.begin; base < run.end; base += 32 * kBatch) {
    int keys[kBatch];
    load_keys(run, base, key_of, keys);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (base + 32 * b < run.end) {
        const int key = keys[b];
        const unsigned peers = __match_any_sync(kAll, key);
        const int rank = __popc(peers & ((1u << lane) - 1u));
        const int position = key >= 0 ? s.own_begin[key] + s.before[warp][key] + rank : 0;
        __syncwarp();
        if (key >= 0 && rank == 0) {
          s.before[warp][key] += static_cast<uint16_t>(__popc(peers));
        }
        __syncwarp();
        if (key >= 0) {
          emit(base + 32 * b + lane, position);
        }
      }
    }
  }
  cluster_sync<BLOCKS>();  // what was emitted is there, and nobody reads this block's counts any more
}

// Row numbers in order of (slot, row). Uses segment_expert and segment_slot, which are written last of all. Begins and
// ends after a barrier of the cluster.
template <int BLOCKS>
__device__ __forceinline__ const int32_t* order_rows(const MoeSortArgs& args, Shared<BLOCKS>& s) {
  const int32_t* slot = args.row_slot;
  unsigned bits = 0;
  for (int t = static_cast<int>(threadIdx.x); t < args.num_rows; t += kThreads) {
    bits |= static_cast<unsigned>(slot[t]);
  }
  const int32_t* from = nullptr;
  int32_t* to = args.order.segment_expert;
  for (int shift = 0; shift < 32; shift += kDigitBits) {
    if (__syncthreads_or((bits >> shift) != 0 ? 1 : 0) == 0) {
      break;
    }
    const auto row_at = [from](int i) { return from != nullptr ? from[i] : i; };
    const auto digit = [&](int i) { return (slot[row_at(i)] >> shift) & ((1 << kDigitBits) - 1); };
    int own;
    int active;
    count_in_block(s, args.num_rows, 1 << kDigitBits, digit);
    cluster_sync<BLOCKS>();  // all blocks' counts are there
    add_blocks(s, args.num_rows, 1 << kDigitBits, &own, &active);
    place_items(s, args.num_rows, digit, [&](int i, int position) { to[position] = row_at(i); });
    from = to;
    to = to == args.order.segment_expert ? args.order.segment_slot : args.order.segment_expert;
  }
  return from;
}

// Marks the heads of segments of the warp's run in s.heads, where those of experts are; counts them, and those of slots
// above 0.
template <int BLOCKS, class Slot>
__device__ __forceinline__ void mark_heads(Shared<BLOCKS>& s, const Run& run, int block_begin, const Slot& slot_at,
                                           uint32_t* found, uint32_t* adapted) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int last = run.begin > 0 && run.begin < run.end ? slot_at(run.begin - 1) : 0;  // slot of the position before
  for (int base = run.begin; base < run.end; base += 32 * kBatch) {
    int slots[kBatch];
    load_keys(run, base, slot_at, slots);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (base + 32 * b < run.end) {
        unsigned& word = s.heads[(base + 32 * b - block_begin) / 32];
        const int left = __shfl_up_sync(kAll, slots[b], 1);
        const int before = lane == 0 ? last : left;
        last = __shfl_sync(kAll, slots[b], 31);
        const bool head = base + 32 * b + lane < run.end && (slots[b] != before || (word >> lane & 1u) != 0);
        const unsigned heads = __ballot_sync(kAll, head);
        *found += static_cast<uint32_t>(__popc(heads));
        *adapted += static_cast<uint32_t>(__popc(__ballot_sync(kAll, head && slots[b] > 0)));
        __syncwarp();
        if (lane == 0) {
          word = heads;
        }
      }
    }
  }
  __syncwarp();
}

template <int BLOCKS>
__device__ __forceinline__ void find_segments(const MoeSortArgs& args, Shared<BLOCKS>& s, int pairs) {
  const MoeOrder& order = args.order;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const Run run = warp_run<BLOCKS>(pairs);
  const int block_begin = block_rank<BLOCKS>() * kWarps * run_length<BLOCKS>(pairs);
  const auto slot_at = [&](int position) {
    return args.row_slot != nullptr ? args.row_slot[order.pair_row[position]] : 0;
  };
  uint32_t found = 0;
  uint32_t adapted = 0;
  mark_heads(s, run, block_begin, slot_at, &found, &adapted);
  uint32_t total;
  uint32_t total_adapted;
  const uint32_t lower = block_exclusive_sum<kWarps>(lane == 0 ? found : 0u, s.warp_sum, &total);
  __syncthreads();  // warp_sum is read
  block_exclusive_sum<kWarps>(lane == 0 ? adapted : 0u, s.warp_sum, &total_adapted);
  if (threadIdx.x == 0) {
    s.found[0] = total;
    s.found[1] = total_adapted;
  }
  cluster_sync<BLOCKS>();  // all blocks' totals are there
  auto next = static_cast<int>(__shfl_sync(kAll, lower, 0));
  total = total_adapted = 0;
#pragma unroll
  for (int rank = 0; rank < BLOCKS; ++rank) {
    const uint32_t in_block = load_from<BLOCKS>(&s.found[0], rank);
    next += rank < block_rank<BLOCKS>() ? static_cast<int>(in_block) : 0;
    total += in_block;
    total_adapted += load_from<BLOCKS>(&s.found[1], rank);
  }
  for (int base = run.begin; base < run.end; base += 32) {
    const unsigned heads = s.heads[(base - block_begin) / 32];
    if ((heads >> lane & 1u) != 0) {
      const int position = base + lane;
      const int segment = next + __popc(heads & ((1u << lane) - 1u));
      order.segment_begin[segment] = position;
      order.segment_expert[segment] = expert_at(s.begin, args.num_experts, position);
      order.segment_slot[segment] = slot_at(position);
    }
    next += __popc(heads);
  }
  if (block_rank<BLOCKS>() == 0 && threadIdx.x == 0) {
    order.segment_begin[total] = pairs;
    *order.num_segments = static_cast<int32_t>(total);
    if (order.totals != nullptr) {
      order.totals[1] += total_adapted;
    }
  }
  cluster_sync<BLOCKS>();  // no block ends while others read its shared memory
}

// Whether this thread finds a slot below that of the row before.
template <int BLOCKS>
__device__ __forceinline__ bool finds_unsorted(const MoeSortArgs& args) {
  bool unsorted = false;
  const int first = block_rank<BLOCKS>() * kThreads + static_cast<int>(threadIdx.x);
  for (int t = first; args.row_slot != nullptr && t < args.num_rows; t += BLOCKS * kThreads) {
    unsorted = unsorted || (t > 0 && args.row_slot[t - 1] > args.row_slot[t]);
  }
  return unsorted;
}

// What is known of the experts, by the thread whose number is an expert's; and the heads that experts are.
template <int BLOCKS>
__device__ __forceinline__ void store_experts(const MoeSortArgs& args, Shared<BLOCKS>& s, int pairs, int lower, int own,
                                              int active) {
  const MoeOrder& order = args.order;
  const int expert = static_cast<int>(threadIdx.x);
  const int block_pairs = kWarps * run_length<BLOCKS>(pairs);
  const int in_block = expert < args.num_experts ? s.begin[expert] - block_rank<BLOCKS>() * block_pairs : -1;
  if (own > 0 && in_block >= 0 && in_block < block_pairs) {
    atomicOr(&s.heads[in_block / 32], 1u << (in_block % 32));
  }
  if (block_rank<BLOCKS>() != 0) {
    return;
  }
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
}

template <int BLOCKS>
__device__ __forceinline__ void sort_pairs(const MoeSortArgs& args, Shared<BLOCKS>& s) {
  static_assert(kThreads >= kMaxKeys && kMaxKeys >= 1 << kDigitBits);
  let_next_start();
  const int pairs = args.num_rows * args.top_k;
  for (int i = static_cast<int>(threadIdx.x); i < kMaxPairs / 32 / BLOCKS; i += kThreads) {
    s.heads[i] = 0;
  }
  wait_for_previous();
  // Item i: choice i % K of the row that comes i / K-th.
  const int32_t* rows = nullptr;
  const auto row_of = [&](int i) { return rows != nullptr ? rows[i / args.top_k] : i / args.top_k; };
  const auto expert_of = [&](int i) { return args.ids[row_of(i) * args.top_k + i % args.top_k]; };
  const bool unsorted = finds_unsorted<BLOCKS>(args);
  count_in_block(s, pairs, args.num_experts, expert_of);
  const int block_unsorted = __syncthreads_or(unsorted ? 1 : 0);
  if (threadIdx.x == 0) {
    s.unsorted = static_cast<uint32_t>(block_unsorted);
  }
  cluster_sync<BLOCKS>();  // all blocks' counts are there
  uint32_t any_unsorted = 0;
#pragma unroll
  for (int rank = 0; rank < BLOCKS; ++rank) {
    any_unsorted |= load_from<BLOCKS>(&s.unsorted, rank);
  }
  if (any_unsorted != 0) {   // the same in all threads
    cluster_sync<BLOCKS>();  // nobody reads this block's counts any more
    rows = order_rows(args, s);
    count_in_block(s, pairs, args.num_experts, expert_of);
    cluster_sync<BLOCKS>();  // all blocks' counts are there
  }
  int own;
  int active;
  const int lower = add_blocks(s, pairs, args.num_experts, &own, &active);
  store_experts(args, s, pairs, lower, own, active);
  place_items(s, pairs, expert_of, [&](int i, int position) {
    const int row = row_of(i);
    args.order.pair_row[position] = row;
    args.order.pair_position[row * args.top_k + i % args.top_k] = position;
  });
  find_segments(args, s, pairs);
}

// Code for GPUs without clusters can run on one that has them. There the kernel of several blocks is empty, hence
// without shared memory.
template <int BLOCKS>
constexpr bool has_body() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return BLOCKS == 1;
#else
  return true;
#endif
}
template <int BLOCKS>
__global__ void __launch_bounds__(kThreads, 1) sort_kernel(const MoeSortArgs args) {
  if constexpr (has_body<BLOCKS>()) {
    __shared__ Shared<BLOCKS> s;
    sort_pairs(args, s);
  }
}

inline void launch(const MoeSortArgs& args, const CudaStream& state) {
  static const bool has_clusters = has_code(sort_kernel<kClusterBlocks>);
  if (state.compute_capability >= 90 && has_clusters) {
    launch_dependent_clusters(sort_kernel<kClusterBlocks>, kClusterBlocks, kClusterBlocks, kThreads, 0, state, args);
  } else {
    launch_dependent(sort_kernel<1>, dim3(1), kThreads, 0, state, args);
  }
}

}  // namespace moelora::sort_many
