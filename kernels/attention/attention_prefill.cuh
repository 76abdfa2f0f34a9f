// SPDX-License-Identifier: Apache-2.0
// Attention of sequences with several new rows. A block takes neighbouring rows of one sequence times the query heads
// of one KV head, as many as its warps have mma rows (16 each), and walks over tiles of KEYS keys: K and V of the next
// two tiles come from the pages by background copies while the current one is in use; q stays in registers, weights go
// from the scores' registers straight into the second product. Tiles begin at multiples of KEYS, and a tile out of a
// row's sight changes nothing in it, so a row's bits do not depend on the rows it shares a block with. Keys that no row
// of the block sees are not read but zero. Limited by tensor cores.
#pragma once

#include "kernels/attention/attention_device.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/shared_tile.cuh"

namespace moelora::attention {

// Rows [first, end) of a sequence; sequence < 0: no work.
struct RowTile {
  int sequence;
  int first;
  int end;
};

// The index-th tile of `rows` rows over all sequences with several rows; of a sequence the last, longest one first. All
// lanes of one warp call it.
__device__ __forceinline__ RowTile find_row_tile(const Params& p, int rows, int index) {
  const int lane = threadIdx.x % 32;
  int before = 0;  // tiles of the sequences before
  for (int base = 0; base < p.num_sequences; base += 32) {
    const int sequence = base + lane;
    const bool inside = sequence < p.num_sequences;
    const int begin = inside ? p.row_begin[sequence] : 0;
    const int end = inside ? p.row_begin[sequence + 1] : 0;
    const int tiles = end - begin > 1 ? (end - begin + rows - 1) / rows : 0;
    int upto = tiles;  // of this sequence and those before it
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int lower = __shfl_up_sync(ALL, upto, offset);
      upto += lane >= offset ? lower : 0;
    }
    upto += before;
    const unsigned hits = __ballot_sync(ALL, index < upto);
    if (hits != 0) {
      const int first = begin + (upto - 1 - index) * rows;
      const int last = first + rows < end ? first + rows : end;
      const int source = __ffs(static_cast<int>(hits)) - 1;
      return {base + source, __shfl_sync(ALL, first, source), __shfl_sync(ALL, last, source)};
    }
    before = __shfl_sync(ALL, upto, 31);
  }
  return {-1, 0, 0};
}

// Chunk c (8 dims) of row r of a tile; see shared_tile.cuh.
template <int MAX_D>
__device__ __forceinline__ uint32_t chunk_address(uint32_t tile, int row, int chunk) {
  // Rows of fewer than 8 chunks do not occur: MAX_D is at least 64.
  return tile + static_cast<uint32_t>(row * MAX_D * 2 + ((chunk ^ (row % 8)) * 16));
}

constexpr int STAGES = 3;  // tiles in shared memory

// What the block works on.
struct Span {
  RowTile rows;
  int kv_head;
  int first_key;  // seen by any row of the block: [first_key, last_key]
  int last_key;
};

template <int MAX_D, int KEYS>
struct PrefillShared {
  __nv_bfloat16 k[STAGES][KEYS][MAX_D];
  __nv_bfloat16 v[STAGES][KEYS][MAX_D];
  Span span;  // the loop over tiles has no registers for it
};

template <int MAX_D, bool EXACT, int WARPS, int KEYS>
__device__ __forceinline__ void copy_tile(const Params& p, const Span& span, int tile, int buffer,
                                          PrefillShared<MAX_D, KEYS>& s) {
  const int head_dim = EXACT ? MAX_D : p.head_dim;
  const int chunks = head_dim / 8;
  const int elements = p.kv.elements;
  const uint32_t k = shared_address(&s.k[buffer][0][0]);
  const uint32_t v = shared_address(&s.v[buffer][0][0]);
  // `to`: from the buffer's first byte, of K and of V.
  const auto copy_chunk = [&](int row, int chunk, uint32_t to) {
    const int key = tile * KEYS + row;
    const bool seen = key >= span.first_key && key <= span.last_key;
    const auto* from = reinterpret_cast<const __nv_bfloat16*>(p.kv.pool);
    if (seen) {
      const int block = p.kv.block_of(key);
      const int line = span.kv_head * p.kv.block_tokens + key - block * p.kv.block_tokens;
      from =
          reinterpret_cast<const __nv_bfloat16*>(p.kv.block(span.rows.sequence, block)) + line * head_dim + 8 * chunk;
    }
    copy_async_16(k + to, from, seen);
    copy_async_16(v + to, seen ? from + elements : from, seen);
  };
  if constexpr (EXACT) {
    constexpr int CHUNKS = MAX_D / 8;
    constexpr int ROWS = WARPS * 32 / CHUNKS;  // at a time; a thread's all have the same swizzle
    static_assert(ROWS % 8 == 0 && KEYS % ROWS == 0);
    const int row = static_cast<int>(threadIdx.x) / CHUNKS;
    const int chunk = static_cast<int>(threadIdx.x) % CHUNKS;
    const uint32_t to = chunk_address<MAX_D>(0, row, chunk);
#pragma unroll
    for (int i = 0; i < KEYS; i += ROWS) {
      copy_chunk(row + i, chunk, to + i * MAX_D * 2);
    }
  } else {
    for (int item = threadIdx.x; item < KEYS * chunks; item += WARPS * 32) {
      copy_chunk(item / chunks, item % chunks, chunk_address<MAX_D>(0, item / chunks, item % chunks));
    }
  }
}

// Dims beyond D are zero in K, as they are in q.
template <int MAX_D, int WARPS, int KEYS>
__device__ __forceinline__ void clear_padding(int head_dim, PrefillShared<MAX_D, KEYS>& s) {
  const int first = head_dim / 8;
  const int chunks = MAX_D / 8 - first;
  for (int item = threadIdx.x; item < STAGES * KEYS * chunks; item += WARPS * 32) {
    const int row = item / chunks;  // over all buffers
    const int chunk = first + item % chunks;
    const int place = (chunk ^ (row % KEYS % 8)) * 8;
    *reinterpret_cast<uint4*>(&s.k[row / KEYS][row % KEYS][place]) = zero_chunk();
  }
}

// State of a warp: lane (g, t) has mma rows g and g + 8.
template <int MAX_D>
struct PrefillState {
  uint32_t q[MAX_D / 16][4];
  int position[2];  // -1: none
  float largest[2];
  float total[2];  // of this lane's keys
  float o[MAX_D / 8][4];
};

// Row of the batch, at span.rows.end or beyond if there is none, and query head of mma row g or g + 8 of the warp.
struct Owner {
  int row;
  int head;
};
__device__ __forceinline__ Owner owner(const Params& p, const Span& span, int half) {
  const int item = static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * half;
  return {span.rows.first + item / p.group, span.kv_head * p.group + item % p.group};
}

template <int MAX_D, bool EXACT>
__device__ __forceinline__ void start_state(const Params& p, const Span& span, PrefillState<MAX_D>& state) {
  const int head_dim = EXACT ? MAX_D : p.head_dim;
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto [row, head] = owner(p, span, half);
    const bool used = row < span.rows.end;
    state.position[half] = used ? p.positions[row] : -1;
    state.largest[half] = minus_infinity();
    state.total[half] = 0.0f;
    const float* q = p.q + row * p.q_stride + static_cast<int64_t>(head) * head_dim;
#pragma unroll
    for (int step = 0; step < MAX_D / 16; ++step) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const int dim = 16 * step + 8 * part + 2 * t;
        const bool inside = used && (EXACT || dim < head_dim);
        state.q[step][half + 2 * part] = inside ? pack_bf16(q[dim] * p.scale_log2e, q[dim + 1] * p.scale_log2e) : 0u;
      }
    }
  }
#pragma unroll
  for (int n = 0; n < MAX_D / 8; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      state.o[n][c] = 0.0f;
    }
  }
}

template <int MAX_D, int KEYS>
__device__ __forceinline__ void score_tile(uint32_t k, const PrefillState<MAX_D>& state, float (&score)[KEYS / 8][4]) {
  const int lane = threadIdx.x % 32;
  const int row = lane / 16 * 8 + lane % 8;
#pragma unroll
  for (int step = 0; step < MAX_D / 16; ++step) {
    const uint32_t(&a)[4] = state.q[step];
#pragma unroll
    for (int n = 0; n < KEYS / 16; ++n) {
      uint32_t b[4];
      load_matrices(b, chunk_address<MAX_D>(k, 16 * n + row, 2 * step + lane / 8 % 2));
      mma_m16n8k16(score[2 * n], a[0], a[1], a[2], a[3], b[0], b[1]);
      mma_m16n8k16(score[2 * n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
    }
  }
}

template <int MAX_D, int KEYS>
__device__ __forceinline__ void mask_tile(int first_key, int window, const PrefillState<MAX_D>& state,
                                          float (&score)[KEYS / 8][4]) {
  const int t = threadIdx.x % 4;
  const int begin[2] = {first_visible(state.position[0], window), first_visible(state.position[1], window)};
#pragma unroll
  for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int key = first_key + 8 * n + 2 * t + c % 2;
      const bool seen = key >= begin[c / 2] && key <= state.position[c / 2];
      score[n][c] = seen ? score[n][c] : minus_infinity();
    }
  }
}

// Scores become weights relative to the new maximum; what was summed so far shrinks to it.
template <int MAX_D, int KEYS>
__device__ __forceinline__ void soften_tile(float (&score)[KEYS / 8][4], PrefillState<MAX_D>& state) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int c = 2 * half;
    float here = score[0][c];
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
      here = fmaxf(here, fmaxf(score[n][c], score[n][c + 1]));
    }
    const float largest = fmaxf(state.largest[half], quad_max(here));
    const float base = finite_or_zero(largest);
    const float shrink = exp2f(state.largest[half] - base);
    state.largest[half] = largest;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
      score[n][c] = exp2f(score[n][c] - base);
      score[n][c + 1] = exp2f(score[n][c + 1] - base);
      sum += score[n][c] + score[n][c + 1];
    }
    state.total[half] = state.total[half] * shrink + sum;
#pragma unroll
    for (int n = 0; n < MAX_D / 8; ++n) {
      state.o[n][c] *= shrink;
      state.o[n][c + 1] *= shrink;
    }
  }
}

template <int MAX_D, int KEYS>
__device__ __forceinline__ void add_tile(uint32_t v, const float (&weight)[KEYS / 8][4], PrefillState<MAX_D>& state) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < KEYS / 16; ++step) {
    const uint32_t a0 = pack_bf16(weight[2 * step][0], weight[2 * step][1]);
    const uint32_t a1 = pack_bf16(weight[2 * step][2], weight[2 * step][3]);
    const uint32_t a2 = pack_bf16(weight[2 * step + 1][0], weight[2 * step + 1][1]);
    const uint32_t a3 = pack_bf16(weight[2 * step + 1][2], weight[2 * step + 1][3]);
#pragma unroll
    for (int n = 0; n < MAX_D / 16; ++n) {
      uint32_t b[4];
      load_matrices_transposed(b, chunk_address<MAX_D>(v, 16 * step + lane % 16, 2 * n + lane / 16));
      mma_m16n8k16(state.o[2 * n], a0, a1, a2, a3, b[0], b[1]);
      mma_m16n8k16(state.o[2 * n + 1], a0, a1, a2, a3, b[2], b[3]);
    }
  }
}

template <int MAX_D, bool EXACT, class Out>
__device__ __forceinline__ void write_rows(const Params& p, const Span& span, const PrefillState<MAX_D>& state) {
  const int head_dim = EXACT ? MAX_D : p.head_dim;
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float total = quad_sum(state.total[half]);
    const auto [row, head] = owner(p, span, half);
    if (row >= span.rows.end) {
      continue;
    }
    const float factor = final_factor(p, head, finite_or_zero(state.largest[half]), total);
    Out* to = static_cast<Out*>(p.out) + row * p.out_stride + static_cast<int64_t>(head) * head_dim + 2 * t;
#pragma unroll
    for (int n = 0; n < MAX_D / 8; ++n) {
      if (EXACT || 8 * n < head_dim) {
        const float low = state.o[n][2 * half] * factor;
        const float high = state.o[n][2 * half + 1] * factor;
        if constexpr (sizeof(Out) == 4) {
          *reinterpret_cast<float2*>(to + 8 * n) = make_float2(low, high);
        } else {
          *reinterpret_cast<uint32_t*>(to + 8 * n) = pack_bf16(low, high);
        }
      }
    }
  }
}

// Grid: [Nkv][tiles of rows, as many as there may be].
template <int MAX_D, bool EXACT, int WARPS, int KEYS, class Out>
__global__ void __launch_bounds__(WARPS * 32, MAX_D == 64 && EXACT ? 2 : 1)
    prefill_kernel(const __grid_constant__ Params p) {
  extern __shared__ uint4 dynamic_shared[];
  auto& s = *reinterpret_cast<PrefillShared<MAX_D, KEYS>*>(dynamic_shared);
  const int kv_heads = p.num_kv_heads;
  let_next_start();
  // Every warp searches for itself: no barrier, and the row borders are in the cache. They and the positions were there
  // before the step.
  const RowTile rows = find_row_tile(p, WARPS * 16 / p.group, static_cast<int>(blockIdx.x) / kv_heads);
  if (rows.sequence < 0) {
    wait_for_previous();  // also here: the end of this kernel must mean that those before it have ended
    return;
  }
  const Span span{rows, static_cast<int>(blockIdx.x) % kv_heads, first_visible(p.positions[rows.first], p.window),
                  p.positions[rows.end - 1]};
  const int first_tile = span.first_key / KEYS;
  const int last_tile = span.last_key / KEYS;
  wait_for_previous();
#pragma unroll
  for (int ahead = 0; ahead < STAGES - 1; ++ahead) {
    if (first_tile + ahead <= last_tile) {
      copy_tile<MAX_D, EXACT, WARPS, KEYS>(p, span, first_tile + ahead, ahead, s);
    }
    commit_copies();
  }
  if constexpr (!EXACT) {
    clear_padding<MAX_D, WARPS, KEYS>(p.head_dim, s);
  }
  if (threadIdx.x == 0) {
    s.span = span;  // the loop's first barrier is between
  }
  PrefillState<MAX_D> state;
  start_state<MAX_D, EXACT>(p, span, state);
  // Of the warp's rows; tiles outside are skipped, which leaves the bits as they are.
  const int warp_end = __reduce_max_sync(ALL, max(state.position[0], state.position[1]));
  const unsigned first_position = __reduce_min_sync(
      ALL, min(static_cast<unsigned>(state.position[0]), static_cast<unsigned>(state.position[1])));  // of those in use
  const int warp_begin = first_visible(static_cast<int>(first_position), p.window);
  int buffer = 0;
  for (int tile = first_tile; tile <= last_tile; ++tile) {
    wait_copies<STAGES - 2>();
    __syncthreads();  // everybody's copies of this tile are there, and nobody reads the tile before it any more
    const int free = buffer == 0 ? STAGES - 1 : buffer - 1;
    if (tile + STAGES - 1 <= last_tile) {
      copy_tile<MAX_D, EXACT, WARPS, KEYS>(p, s.span, tile + STAGES - 1, free, s);
    }
    commit_copies();
    const int first_key = tile * KEYS;
    if (first_key <= warp_end && first_key + KEYS > warp_begin) {
      float score[KEYS / 8][4] = {};
      score_tile<MAX_D, KEYS>(shared_address(&s.k[buffer][0][0]), state, score);
      const int last_key = first_key + KEYS - 1;
      const int least = min(state.position[0], state.position[1]);
      const int most = max(state.position[0], state.position[1]);
      if (first_key < first_visible(most, p.window) || last_key > least) {
        mask_tile<MAX_D, KEYS>(first_key, p.window, state, score);
      }
      __syncwarp();
      soften_tile<MAX_D, KEYS>(score, state);
      add_tile<MAX_D, KEYS>(shared_address(&s.v[buffer][0][0]), score, state);
    }
    buffer = buffer == STAGES - 1 ? 0 : buffer + 1;
  }
  write_rows<MAX_D, EXACT, Out>(p, s.span, state);
}

}  // namespace moelora::attention
