// SPDX-License-Identifier: Apache-2.0
// What attention_decode.cuh does with 16 keys, a unit, in a warp's registers: loads, scores, weights, weighted sums;
// and how q comes to shared memory, rotated on the way or not.
//
// Fragments, with g = lane / 4 and t = lane % 4. Scores S[16 heads x 8 keys] = Q K^T: lane (g, t) holds the chunks (8
// dims) t, t + 4, ... of key g (mma_tile.cuh: the order of dims is free). Output O[16 heads x dims] += P V: the second
// operand wants pairs of keys of one dim, so lane (g, t) loads chunk g, g + 8, ... of the keys 2t, 2t+1, 2t+8, 2t+9 and
// interleaves them; mma j of 8 covers dim j of every chunk, and the lane ends with the 16 dims of chunks 2t and 2t + 1.
#pragma once

#include "kernels/attention/attention_device.cuh"
#include "kernels/cuda/async_copy.cuh"

namespace moelora::attention {

constexpr int HEADS = 16;  // rows of an mma

template <int MAX_D>
struct DecodeShape {
  static constexpr int K_STEPS = (MAX_D + 31) / 32;  // of 32 dims
  static constexpr int V_STEPS = (MAX_D + 63) / 64;  // of 64 dims
  static constexpr int FRAGMENTS = K_STEPS * 2 * 32;
};

struct Where {
  int row;
  int sequence;
  int kv_head;
  int first_head;  // query head of row 0
  int heads;       // rows in use
  int head_dim;
  int active;  // splits with keys
};

// Dynamic shared memory of a decode block.
template <int MAX_D, int WARPS>
struct DecodeShared {
  uint4 q_high[DecodeShape<MAX_D>::FRAGMENTS];  // step i, heads 8h .. 8h+7, lane: at (2i + h) * 32 + lane
  uint4 q_low[DecodeShape<MAX_D>::FRAGMENTS];
  float warp_max[WARPS][HEADS];
  float warp_sum[WARPS][HEADS];
  Where where;  // what is wanted rarely need not stay in registers
  // Of a kernel that rotates: how, and the row's own K and V, which are not read from the page.
  rope::Tables<MAX_D> tables;
  uint4 new_key[MAX_D / 8];
  uint4 new_value[MAX_D / 8];
  // Followed by the weighted sums of the warps, [WARPS][heads][D], and the mailbox.
  __device__ float* sums() { return reinterpret_cast<float*>(this + 1); }
};

// One unit's keys and values in registers.
template <int MAX_D>
struct Unit {
  uint4 k[2][DecodeShape<MAX_D>::K_STEPS];
  uint4 v[DecodeShape<MAX_D>::V_STEPS][4];
};

// State of a warp: lane (g, t) has rows (heads) g and g + 8.
template <int MAX_D>
struct WarpState {
  float largest[2];
  float total[2];  // of this lane's keys
  float o[DecodeShape<MAX_D>::V_STEPS][8][4];
};

// First key of a unit for each lane: lane i's is unit + i * WARPS, the i-th of its warp from here on. The values are
// kv.elements further. All that can be looked up for a warp's units at once is.
template <int WARPS>
__device__ __forceinline__ const __nv_bfloat16* find_keys(const Params& p, const Where& where, int unit, int last) {
  const int mine = unit + static_cast<int>(threadIdx.x) % 32 * WARPS;
  if (mine >= last) {
    return nullptr;
  }
  const int block = p.kv.block_of(mine * UNIT);
  const int row = where.kv_head * p.kv.block_tokens + mine * UNIT - block * p.kv.block_tokens;
  return reinterpret_cast<const __nv_bfloat16*>(p.kv.block(where.sequence, block)) +
         static_cast<int64_t>(row) * where.head_dim;
}
__device__ __forceinline__ const __nv_bfloat16* of_lane(const __nv_bfloat16* keys, int lane) {
  return reinterpret_cast<const __nv_bfloat16*>(
      __shfl_sync(ALL, static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(keys)), lane));
}
// Brings a unit of heads of exactly MAX_D to the L2.
template <int MAX_D>
__device__ __forceinline__ void prefetch_unit(const __nv_bfloat16* keys, int elements) {
  constexpr int LINES = UNIT * MAX_D * 2 / 128;  // of K, as many of V
#pragma unroll
  for (int line = threadIdx.x % 32; line < 2 * LINES; line += 32) {
    prefetch_l2(keys + line % LINES * 64 + (line < LINES ? 0 : elements));
  }
}

// Steps [FIRST, LAST) of 32 dims of K, or of 64 dims of V.
template <int FIRST, int LAST, bool EXACT, int MAX_D>
__device__ __forceinline__ void load_k(const __nv_bfloat16* keys, int head_dim, Unit<MAX_D>& unit) {
  const int g = threadIdx.x % 32 / 4;
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const __nv_bfloat16* from = keys + (8 * tile + g) * head_dim + 8 * t;
#pragma unroll
    for (int i = FIRST; i < LAST; ++i) {
      const bool inside = EXACT || 8 * (t + 4 * i) < head_dim;
      unit.k[tile][i] = inside ? load_streaming(from + 32 * i) : zero_chunk();
    }
  }
}

template <int FIRST, int LAST, bool EXACT, int MAX_D>
__device__ __forceinline__ void load_v(const __nv_bfloat16* values, int head_dim, Unit<MAX_D>& unit) {
  const int g = threadIdx.x % 32 / 4;
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const __nv_bfloat16* from = values + (2 * t + r % 2 + 8 * (r / 2)) * head_dim + 8 * g;
#pragma unroll
    for (int i = FIRST; i < LAST; ++i) {
      const bool inside = EXACT || 8 * (g + 8 * i) < head_dim;
      unit.v[i][r] = inside ? load_streaming(from + 64 * i) : zero_chunk();
    }
  }
}

// q times scale * log2(e), in two bf16 parts, as fragments; rows without a head and dims beyond D are zero.
template <int MAX_D, int WARPS>
__device__ __forceinline__ void stage_q(const Params& p, const Where& where, DecodeShared<MAX_D, WARPS>& s) {
  constexpr int CHUNKS = DecodeShape<MAX_D>::K_STEPS * 4;
  const float* q = p.q + where.row * p.q_stride + static_cast<int64_t>(where.first_head) * where.head_dim;
  for (int item = threadIdx.x; item < HEADS * CHUNKS; item += WARPS * 32) {
    const int head = item / CHUNKS;
    const int chunk = item % CHUNKS;
    float values[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const bool inside = head < where.heads && 8 * chunk + e < where.head_dim;
      values[e] = inside ? __fmul_rn(q[head * where.head_dim + 8 * chunk + e], p.scale_log2e) : 0.0f;
    }
    const SplitChunk split = split_chunk(values);
    const int at = (chunk / 4 * 2 + head / 8) * 32 + head % 8 * 4 + chunk % 4;
    s.q_high[at] = split.high;
    s.q_low[at] = split.low;
  }
}

// What of the rotation needs no row: its tables, and zeros for query heads that there are not.
template <int D, int WARPS>
__device__ __forceinline__ void prepare_rotation(const Params& p, int position, DecodeShared<D, WARPS>& s) {
  for (int i = threadIdx.x; i < DecodeShape<D>::FRAGMENTS; i += WARPS * 32) {
    s.q_high[i] = zero_chunk();
    s.q_low[i] = zero_chunk();
  }
  rope::fill_tables<D>(p.form, position, s.tables);
}
// Where the row's own K goes.
__device__ __forceinline__ __nv_bfloat16* own_key(const Params& p, const Where& where, int position) {
  const int block = p.kv.block_of(position);
  const int line = where.kv_head * p.kv.block_tokens + position - block * p.kv.block_tokens;
  return reinterpret_cast<__nv_bfloat16*>(p.kv.block(where.sequence, block)) + line * where.head_dim;
}
// The same of q that is not rotated yet, with K and V of the row: they come to shared memory and, if this block is the
// one that `writes`, to their place in the page, where K is at `keys`. Bits are those of rope_kv_write followed by
// stage_q.
template <int D, int WARPS>
__device__ __forceinline__ void stage_rotated(const Params& p, const Where& where, bool writes, __nv_bfloat16* keys,
                                              DecodeShared<D, WARPS>& s) {
  constexpr int LANES = D / 8;
  const int shares = (where.heads + 2) * LANES;
#pragma unroll 1
  for (int share = threadIdx.x; share < (shares + 31) / 32 * 32; share += WARPS * 32) {
    const int h = share / LANES;  // heads of q, then K, then V
    const int l = share % LANES;
    const rope::Kind kind = h < where.heads ? rope::Kind::kQ : h == where.heads ? rope::Kind::kK : rope::Kind::kV;
    rope::Part part = {};
    if (share < shares) {
      const float* from = kind == rope::Kind::kQ   ? p.q + where.row * p.q_stride + (where.first_head + h) * D
                          : kind == rope::Kind::kK ? p.k + where.row * p.k_stride + where.kv_head * D
                                                   : p.v + where.row * p.v_stride + where.kv_head * D;
      part = rope::load_part<D>(from, l);
    }
    rope::turn_part<D>(p.form, s.tables, kind, l, part);
    if (share >= shares) {
      continue;
    }
    if (kind == rope::Kind::kQ) {
      float values[8];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        values[e] = __fmul_rn(part.a.at[e], p.scale_log2e);
        values[4 + e] = __fmul_rn(part.b.at[e], p.scale_log2e);
      }
      const SplitChunk split = split_chunk(values);
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // of the head
        const int chunk = half * (D / 16) + l / 2;
        const int at = ((chunk / 4 * 2 + h / 8) * 32 + h % 8 * 4 + chunk % 4) * 2 + l % 2;
        reinterpret_cast<uint2*>(s.q_high)[at] =
            half == 0 ? make_uint2(split.high.x, split.high.y) : make_uint2(split.high.z, split.high.w);
        reinterpret_cast<uint2*>(s.q_low)[at] =
            half == 0 ? make_uint2(split.low.x, split.low.y) : make_uint2(split.low.z, split.low.w);
      }
      continue;
    }
    const bool is_key = kind == rope::Kind::kK;
    rope::store_part<D>(part, reinterpret_cast<__nv_bfloat16*>(is_key ? s.new_key : s.new_value), l);
    if (writes) {
      rope::store_part<D>(part, keys + (is_key ? 0 : p.kv.elements), l);
    }
  }
}

// Puts the row's own K and V, which is key `at` of the unit, in place of what was read.
template <int MAX_D, int WARPS>
__device__ __forceinline__ void insert_new_key(const DecodeShared<MAX_D, WARPS>& s, int at, Unit<MAX_D>& unit) {
  const int g = threadIdx.x % 32 / 4;
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int i = 0; i < DecodeShape<MAX_D>::K_STEPS; ++i) {
      if (8 * tile + g == at) {
        unit.k[tile][i] = s.new_key[t + 4 * i];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int i = 0; i < DecodeShape<MAX_D>::V_STEPS; ++i) {
      if (2 * t + r % 2 + 8 * (r / 2) == at) {
        unit.v[i][r] = s.new_value[g + 8 * i];
      }
    }
  }
}

// Products with the low parts are summed apart: half the length of the chain of products that wait for each other.
template <int FIRST, int LAST, int MAX_D, int WARPS>
__device__ __forceinline__ void score_unit(const DecodeShared<MAX_D, WARPS>& s, const Unit<MAX_D>& unit,
                                           float (&score)[2][4]) {
  const int lane = threadIdx.x % 32;
  float low[2][4] = {};
#pragma unroll
  for (int i = FIRST; i < LAST; ++i) {
    const uint4 high_0 = s.q_high[2 * i * 32 + lane];
    const uint4 high_1 = s.q_high[(2 * i + 1) * 32 + lane];
    const uint4 low_0 = s.q_low[2 * i * 32 + lane];
    const uint4 low_1 = s.q_low[(2 * i + 1) * 32 + lane];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      mma_chunk(score[tile], high_0, high_1, unit.k[tile][i]);
      mma_chunk(low[tile], low_0, low_1, unit.k[tile][i]);
    }
  }
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      score[tile][c] += low[tile][c];
    }
  }
}

// Scores of keys out of sight become -inf, their values 0: what lies there may be NaN.
__device__ __forceinline__ void mask_scores(int first_key, int begin, int position, float (&score)[2][4]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int key = first_key + 8 * tile + 2 * t + c % 2;
      score[tile][c] = key >= begin && key <= position ? score[tile][c] : minus_infinity();
    }
  }
}
template <int FIRST, int LAST, int MAX_D>
__device__ __forceinline__ void mask_values(int first_key, int begin, int position, Unit<MAX_D>& unit) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int key = first_key + 2 * t + r % 2 + 8 * (r / 2);
    if (key < begin || key > position) {
#pragma unroll
      for (int i = FIRST; i < LAST; ++i) {
        unit.v[i][r] = zero_chunk();
      }
    }
  }
}

// Scores become weights relative to the new maximum; what was summed so far shrinks to it.
template <int MAX_D>
__device__ __forceinline__ void soften(float (&score)[2][4], WarpState<MAX_D>& state) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int c = 2 * half;
    const float here = quad_max(fmaxf(fmaxf(score[0][c], score[0][c + 1]), fmaxf(score[1][c], score[1][c + 1])));
    const float largest = fmaxf(state.largest[half], here);
    const float base = finite_or_zero(largest);
    const float shrink = exp2f(state.largest[half] - base);
    state.largest[half] = largest;
    float sum = 0.0f;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        score[tile][c + e] = exp2f(score[tile][c + e] - base);
        sum += score[tile][c + e];
      }
    }
    state.total[half] = state.total[half] * shrink + sum;
#pragma unroll
    for (int i = 0; i < DecodeShape<MAX_D>::V_STEPS; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        state.o[i][j][c] *= shrink;
        state.o[i][j][c + 1] *= shrink;
      }
    }
  }
}

template <int FIRST, int LAST, int MAX_D>
__device__ __forceinline__ void add_values(const float (&weight)[2][4], const Unit<MAX_D>& unit,
                                           WarpState<MAX_D>& state) {
  const uint32_t a0 = pack_bf16(weight[0][0], weight[0][1]);
  const uint32_t a1 = pack_bf16(weight[0][2], weight[0][3]);
  const uint32_t a2 = pack_bf16(weight[1][0], weight[1][1]);
  const uint32_t a3 = pack_bf16(weight[1][2], weight[1][3]);
#pragma unroll
  for (int i = FIRST; i < LAST; ++i) {
    const uint4(&v)[4] = unit.v[i];
    const uint32_t words[4][4] = {{v[0].x, v[1].x, v[2].x, v[3].x},
                                  {v[0].y, v[1].y, v[2].y, v[3].y},
                                  {v[0].z, v[1].z, v[2].z, v[3].z},
                                  {v[0].w, v[1].w, v[2].w, v[3].w}};
#pragma unroll
    for (int w = 0; w < 4; ++w) {  // dims 2w and 2w + 1 of the chunk
      const uint32_t(&word)[4] = words[w];
      mma_m16n8k16(state.o[i][2 * w], a0, a1, a2, a3, __byte_perm(word[0], word[1], 0x5410),
                   __byte_perm(word[2], word[3], 0x5410));
      mma_m16n8k16(state.o[i][2 * w + 1], a0, a1, a2, a3, __byte_perm(word[0], word[1], 0x7632),
                   __byte_perm(word[2], word[3], 0x7632));
    }
  }
}

// One unit whose K and V do not fit into registers beside the sums: loaded and used by halves.
template <bool EXACT, int MAX_D, int WARPS>
__device__ __forceinline__ void attend_wide_unit(const __nv_bfloat16* keys, const __nv_bfloat16* values, int head_dim,
                                                 int first_key, int begin, int position,
                                                 const DecodeShared<MAX_D, WARPS>& s, WarpState<MAX_D>& state) {
  constexpr int K = DecodeShape<MAX_D>::K_STEPS;
  constexpr int V = DecodeShape<MAX_D>::V_STEPS;
  Unit<MAX_D> data;
  float score[2][4] = {};
  load_k<0, K / 2, EXACT>(keys, head_dim, data);
  score_unit<0, K / 2>(s, data, score);
  load_k<K / 2, K, EXACT>(keys, head_dim, data);
  score_unit<K / 2, K>(s, data, score);
  load_v<0, V / 2, EXACT>(values, head_dim, data);
  mask_scores(first_key, begin, position, score);
  soften(score, state);
  mask_values<0, V / 2>(first_key, begin, position, data);
  add_values<0, V / 2>(score, data, state);
  load_v<V / 2, V, EXACT>(values, head_dim, data);
  mask_values<V / 2, V>(first_key, begin, position, data);
  add_values<V / 2, V>(score, data, state);
}

template <bool EXACT, int MAX_D>
__device__ __forceinline__ void load_unit(const __nv_bfloat16* keys, int head_dim, int elements, Unit<MAX_D>& unit) {
  load_k<0, DecodeShape<MAX_D>::K_STEPS, EXACT>(keys, head_dim, unit);
  load_v<0, DecodeShape<MAX_D>::V_STEPS, EXACT>(keys + elements, head_dim, unit);
}

}  // namespace moelora::attention
