// SPDX-License-Identifier: Apache-2.0
// Attention of sequences with one new row. A block takes one split of a row's visible keys for up to 16 query heads
// that share a KV head; each warp takes every WARPS-th unit of 16 keys, with K and V loaded from the pages straight
// into tensor core fragments, 16 bytes a lane: the next unit's K while V is in use and the other way round, and the
// unit after that into the L2 (H200, 64 rows of Qwen3-30B-A3B's shape at 1,900 keys: 75 us without, 70 with). Warps
// are joined in shared memory; the splits of a row are a thread block cluster, whose blocks send each other their sums,
// or where there are none meet in scratch and a second kernel; always in the order of their numbers. A warp's first
// unit is on its way before the kernel ahead has ended: only the row's own key is that one's work.
#pragma once

#include "kernels/attention/attention_unit.cuh"
#include "kernels/attention/paged_attention.h"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/launch.cuh"

namespace moelora::attention {

// Blocks of a launch that an SM runs at once: registers of a thread follow from it.
constexpr int decode_blocks(int max_d, int warps) {
  return (max_d <= 64 ? 16 : 8) / warps;
}

// Fixed by the row's position and constants of the launch: how many splits have keys, and which.
struct SplitPlan {
  int active;  // splits with at least one unit a warp, or 1
  int first;   // units [first, last) of this split
  int last;
};
__device__ __forceinline__ SplitPlan plan_split(int begin, int position, int splits, int split, int warps) {
  const int first = begin / UNIT;
  const int units = position / UNIT - first + 1;
  const int wanted = (units + warps - 1) / warps;
  const int active = wanted < splits ? wanted : splits;
  return {active, first + units * split / active, first + units * (split + 1) / active};
}

// What a warp does: its units are first, first + WARPS, ... below `last`. `keys`: find_keys(first).
struct Work {
  int first;
  int last;
  int begin;  // visible keys: [begin, position]
  int position;
  const __nv_bfloat16* keys;
};

// The warp's first unit, if it has one and heads are not wide.
template <bool EXACT, int MAX_D>
__device__ __forceinline__ void load_first(const Params& p, const Work& work, Unit<MAX_D>& data) {
  if (MAX_D <= 128 && work.first < work.last) {
    load_unit<EXACT>(of_lane(work.keys, 0), EXACT ? MAX_D : p.head_dim, p.kv.elements, data);
  }
}

// The units of one warp; `data` holds the first one's keys and values unless heads are wide.
template <int MAX_D, bool EXACT, bool ROPE, int WARPS>
__device__ __forceinline__ void attend_units(const Params& p, const Work& work, const DecodeShared<MAX_D, WARPS>& s,
                                             Unit<MAX_D>& data, WarpState<MAX_D>& state) {
  constexpr int K = DecodeShape<MAX_D>::K_STEPS;
  constexpr int V = DecodeShape<MAX_D>::V_STEPS;
  const int head_dim = EXACT ? MAX_D : p.head_dim;
  const int last = work.last;
  const __nv_bfloat16* lane_keys = work.keys;
  int step = 0;
  for (int unit = work.first; unit < last; unit += WARPS) {
    const int first_key = unit * UNIT;
    const __nv_bfloat16* const keys = of_lane(lane_keys, step % 32);
    const int next = unit + WARPS;
    if (++step % 32 == 0) {
      lane_keys = find_keys<WARPS>(p, s.where, next, last);
    }
    if constexpr (MAX_D > 128) {
      attend_wide_unit<EXACT>(keys, keys + p.kv.elements, head_dim, first_key, work.begin, work.position, s, state);
      continue;
    }
    const __nv_bfloat16* const next_keys = of_lane(lane_keys, step % 32);
    if (EXACT && step % 32 != 31 && next + WARPS < last) {
      prefetch_unit<MAX_D>(of_lane(lane_keys, step % 32 + 1), p.kv.elements);
    }
    if (ROPE && work.position < first_key + UNIT) {
      insert_new_key(s, work.position - first_key, data);
    }
    float score[2][4] = {};
    score_unit<0, K>(s, data, score);
    if (next < last) {
      load_k<0, K, EXACT>(next_keys, head_dim, data);
    }
    if (first_key < work.begin || first_key + UNIT - 1 > work.position) {
      mask_scores(first_key, work.begin, work.position, score);
      mask_values<0, V>(first_key, work.begin, work.position, data);
    }
    soften(score, state);
    add_values<0, V>(score, data, state);
    if (next < last) {
      load_v<0, V, EXACT>(next_keys + p.kv.elements, head_dim, data);
    }
  }
}

// Leaves the warp's maximum, denominator and sums in shared memory.
template <int MAX_D, int WARPS>
__device__ __forceinline__ void publish_warp(const Where& where, const WarpState<MAX_D>& state,
                                             DecodeShared<MAX_D, WARPS>& s) {
  const int warp = threadIdx.x / 32;
  const int g = threadIdx.x % 32 / 4;
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float total = quad_sum(state.total[half]);
    const int head = g + 8 * half;
    if (head >= where.heads) {
      continue;
    }
    if (t == 0) {
      s.warp_max[warp][head] = state.largest[half];
      s.warp_sum[warp][head] = total;
    }
    float* to = s.sums() + (warp * where.heads + head) * where.head_dim;
#pragma unroll
    for (int i = 0; i < DecodeShape<MAX_D>::V_STEPS; ++i) {
      if (64 * i + 16 * t < where.head_dim) {
#pragma unroll
        for (int j = 0; j < 16; j += 4) {
          const int c = 2 * half + j / 8;
          *reinterpret_cast<float4*>(to + 64 * i + 16 * t + j) = make_float4(
              state.o[i][j % 8][c], state.o[i][j % 8 + 1][c], state.o[i][j % 8 + 2][c], state.o[i][j % 8 + 3][c]);
        }
      }
    }
  }
}

// Parts of one softmax, joined one after the other.
struct Joined {
  float largest;
  float total;
  float4 sum;
};
// The first `count` of at most COUNT parts: part(i) gives maximum and denominator, values(i) the weighted sums. All are
// asked for at once.
template <int COUNT, class Part, class Values>
__device__ __forceinline__ Joined join(int count, const Part& part, const Values& values) {
  Joined result{minus_infinity(), 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
  float2 stats[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    stats[i] = i < count ? part(i) : make_float2(minus_infinity(), 0.0f);
    result.largest = fmaxf(result.largest, stats[i].x);
  }
  const float base = finite_or_zero(result.largest);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    if (i < count) {
      const float shrink = exp2f(stats[i].x - base);
      const float4 sum = values(i);
      result.total += stats[i].y * shrink;
      result.sum.x += sum.x * shrink;
      result.sum.y += sum.y * shrink;
      result.sum.z += sum.z * shrink;
      result.sum.w += sum.w * shrink;
    }
  }
  return result;
}

template <class Out>
__device__ __forceinline__ void write_output(const Params& p, int64_t row, int head, int head_dim, int dim,
                                             const Joined& joined) {
  const float factor = final_factor(p, head, finite_or_zero(joined.largest), joined.total);
  Out* to = static_cast<Out*>(p.out) + row * p.out_stride + static_cast<int64_t>(head) * head_dim + dim;
  store4(to, 0,
         Vec4<Out>{from_f32<Out>(joined.sum.x * factor), from_f32<Out>(joined.sum.y * factor),
                   from_f32<Out>(joined.sum.z * factor), from_f32<Out>(joined.sum.w * factor)});
}

// Scratch: sums [num_sequences * num_heads][kMaxAttentionSplits][D], then maximum and denominator of each.
__device__ __forceinline__ int64_t scratch_part(const Params& p, int sequence, int head, int split) {
  return (static_cast<int64_t>(sequence) * p.num_heads + head) * kMaxAttentionSplits + split;
}
__device__ __forceinline__ float* scratch_sum(const Params& p, int sequence, int head, int split) {
  return p.scratch + scratch_part(p, sequence, head, split) * p.head_dim;
}
__device__ __forceinline__ float2* scratch_stats(const Params& p, int sequence, int head, int split) {
  const int64_t parts = static_cast<int64_t>(p.num_sequences) * p.num_heads * kMaxAttentionSplits;
  return reinterpret_cast<float2*>(p.scratch + parts * p.head_dim) + scratch_part(p, sequence, head, split);
}

// How the launch is cut. Grid: [num_sequences][Nkv][head tiles][splits]; `in_cluster`: the splits of a row are one
// cluster, else they meet in scratch.
struct DecodeGrid {
  int head_tiles;
  int splits;
  bool in_cluster;
};

// The outputs of a row (in fours, `items` of them) are shared out to the blocks of its cluster. Each block sends every
// part of what it has to the block that writes it, which needs no more than one barrier of the cluster then.
struct Mailbox {
  float4* sums;   // [active][share], in every block's shared memory
  float2* stats;  // likewise: maximum and denominator
  int share;
};
__device__ __forceinline__ Mailbox mailbox(float* memory, int items, int active) {
  // The blocks' shares, rounded up, are fewer than kMaxAttentionSplits items more than there are.
  auto* const sums = reinterpret_cast<float4*>(memory);
  return {sums, reinterpret_cast<float2*>(sums + items + kMaxAttentionSplits), (items + active - 1) / active};
}
constexpr size_t mailbox_bytes(int items) {
  return static_cast<size_t>(items + kMaxAttentionSplits) * (sizeof(float4) + sizeof(float2));
}
__device__ __forceinline__ void send(const Mailbox& box, int split, int item, const Joined& joined) {
  const int owner = item / box.share;
  const int at = split * box.share + item - owner * box.share;
  *in_block(box.sums + at, owner) = joined.sum;
  *in_block(box.stats + at, owner) = make_float2(joined.largest, joined.total);
}

// The block's sums, of all its warps, go to the output, to the blocks of its cluster or to scratch.
template <int MAX_D, int WARPS, class Out>
__device__ __forceinline__ void hand_over(const Params& p, const DecodeGrid& grid, int split,
                                          DecodeShared<MAX_D, WARPS>& s) {
  const Where where = s.where;
  const int active = where.active;
  const int quads = where.head_dim / 4;
  const int items = where.heads * quads;
  const int warp_stride = where.heads * where.head_dim;
  const Mailbox box = mailbox(s.sums() + WARPS * warp_stride, items, active);
  const bool sends = active > 1 && grid.in_cluster;
  if (sends) {
    cluster_wait();  // every block of the cluster has begun, so that its shared memory may be written
  }
  for (int i = threadIdx.x; i < items; i += WARPS * 32) {
    const int head = i / quads;
    const int dim = i % quads * 4;
    const float* const sums = s.sums() + head * where.head_dim + dim;
    const Joined joined = join<WARPS>(
        WARPS, [&](int w) { return make_float2(s.warp_max[w][head], s.warp_sum[w][head]); },
        [&](int w) { return *reinterpret_cast<const float4*>(sums + w * warp_stride); });
    const int out_head = where.first_head + head;
    if (active == 1) {
      write_output<Out>(p, where.row, out_head, where.head_dim, dim, joined);
    } else if (sends) {
      send(box, split, i, joined);
    } else {
      *reinterpret_cast<float4*>(scratch_sum(p, where.sequence, out_head, split) + dim) = joined.sum;
      if (dim == 0) {
        *scratch_stats(p, where.sequence, out_head, split) = make_float2(joined.largest, joined.total);
      }
    }
  }
  if (!sends) {
    return;
  }
  __syncwarp();
  cluster_arrive();
  cluster_wait();  // everything that this block writes has come
  for (int slot = threadIdx.x; slot < box.share && split * box.share + slot < items; slot += WARPS * 32) {
    const Joined joined = join<kMaxAttentionSplits>(
        active, [&](int i) { return box.stats[i * box.share + slot]; },
        [&](int i) { return box.sums[i * box.share + slot]; });
    const int item = split * box.share + slot;
    write_output<Out>(p, where.row, where.first_head + item / quads, where.head_dim, item % quads * 4, joined);
  }
}

// All a block without keys has to do.
__device__ __forceinline__ void sit_out(bool meets) {
  wait_for_previous();  // also here: the end of this kernel must mean that those before it have ended
  if (meets) {
    cluster_wait();
    cluster_arrive_relaxed();
    cluster_wait();
  }
}

// Row borders, positions and block tables, and K and V of all positions but the row's own, were there before the step:
// they are read while the kernel ahead still runs. ROPE: that one left q, K and V as they were projected.
template <int MAX_D, bool EXACT, bool ROPE, int WARPS, class Out>
__global__ void __launch_bounds__(WARPS * 32, decode_blocks(MAX_D, WARPS))
    decode_kernel(const __grid_constant__ Params p, const __grid_constant__ DecodeGrid grid) {
  extern __shared__ uint4 dynamic_shared[];
  auto& s = *reinterpret_cast<DecodeShared<MAX_D, WARPS>*>(dynamic_shared);
  let_next_start();
  const int split = static_cast<int>(blockIdx.x) % grid.splits;
  const int item = static_cast<int>(blockIdx.x) / grid.splits;
  const int tile = item % grid.head_tiles;
  const int kv_head = item / grid.head_tiles % p.num_kv_heads;
  const int sequence = item / grid.head_tiles / p.num_kv_heads;
  const int row = p.row_begin[sequence];
  if (p.row_begin[sequence + 1] != row + 1) {
    return sit_out(false);  // none, or prefill's; the same for all blocks of a cluster
  }
  const int position = p.positions[row];
  const int begin = first_visible(position, p.window);
  const SplitPlan plan = plan_split(begin, position, grid.splits, split, WARPS);
  const Where where{row,
                    sequence,
                    kv_head,
                    kv_head * p.group + tile * HEADS,
                    min(p.group - tile * HEADS, HEADS),
                    EXACT ? MAX_D : p.head_dim,
                    plan.active};
  const bool meets = grid.in_cluster && plan.active > 1;
  if (meets) {
    cluster_arrive_relaxed();  // this block has begun
  }
  if (split >= plan.active) {
    return sit_out(meets);
  }
  const int first = plan.first + static_cast<int>(threadIdx.x) / 32;
  const Work work{first, plan.last, begin, position, find_keys<WARPS>(p, where, first, plan.last)};
  Unit<MAX_D> data;
  const bool waits = !ROPE && first == position / UNIT;  // for the row's own key
  if (!waits) {
    load_first<EXACT>(p, work, data);
  }
  if (EXACT && first + WARPS < plan.last) {
    prefetch_unit<MAX_D>(of_lane(work.keys, 1), p.kv.elements);
  }
  if constexpr (ROPE) {
    prepare_rotation(p, position, s);
    const bool writes = tile == 0 && split == plan.active - 1;
    __nv_bfloat16* const keys = writes ? own_key(p, where, position) : nullptr;
    __syncthreads();  // the tables are there
    wait_for_previous();
    stage_rotated(p, where, writes, keys, s);
  } else {
    wait_for_previous();
    if (waits) {
      load_first<EXACT>(p, work, data);
    }
    stage_q(p, where, s);
  }
  if (threadIdx.x == 0) {
    s.where = where;
  }
  __syncthreads();  // q is there
  WarpState<MAX_D> state = {{minus_infinity(), minus_infinity()}, {}, {}};
  attend_units<MAX_D, EXACT, ROPE, WARPS>(p, work, s, data, state);
  publish_warp(s.where, state, s);
  __syncthreads();  // the sums of all warps are there
  hand_over<MAX_D, WARPS, Out>(p, grid, static_cast<int>(blockIdx.x) % grid.splits, s);
}

// Joins splits through scratch. Grid: [num_sequences * num_heads], a thread four dims.
template <class Out>
__global__ void join_splits_kernel(const Params p, int splits, int warps) {
  const int sequence = static_cast<int>(blockIdx.x) / p.num_heads;
  const int head = static_cast<int>(blockIdx.x) % p.num_heads;
  const int row = p.row_begin[sequence];
  if (p.row_begin[sequence + 1] != row + 1) {
    return;
  }
  const int position = p.positions[row];
  const int active = plan_split(first_visible(position, p.window), position, splits, 0, warps).active;
  const int dim = threadIdx.x * 4;
  if (active == 1 || dim >= p.head_dim) {
    return;  // one split writes the output itself
  }
  const Joined joined = join<kMaxAttentionSplits>(
      active, [&](int i) { return *scratch_stats(p, sequence, head, i); },
      [&](int i) { return *reinterpret_cast<const float4*>(scratch_sum(p, sequence, head, i) + dim); });
  write_output<Out>(p, row, head, p.head_dim, dim, joined);
}

}  // namespace moelora::attention
