// SPDX-License-Identifier: Apache-2.0
// The end of an item of kernels/moe/expert_prefill_sm90.cuh. The usual one, bf16 outputs in pairs, has few
// instructions, since the tensor cores of the block wait for it: all that is the same for a row tile is decided before
// its tokens are gone through, and a quotient is a product with the reciprocal. Outputs of any other kind are stored
// one by one, or in pairs where they are aligned.
#pragma once

#include "kernels/cuda/wgmma.cuh"
#include "kernels/moe/expert_prefill_tile.cuh"

namespace moelora::sm90 {

enum class Finish : uint8_t { kPlain, kSilu, kClampedSwiglu };

template <Finish FINISH>
__device__ __forceinline__ float finish_gate_up(float limit, float g, float u) {
  if constexpr (FINISH == Finish::kSilu) {
    return __fdividef(g, 1.0f + __expf(-g)) * u;
  }
  g = fminf(g, limit);
  u = fminf(fmaxf(u, -limit), limit);
  return __fdividef((u + 1.0f) * g, 1.0f + __expf(-1.702f * g));
}
// Values of output g and tokens 2t, 2t + 1, as outputs 2t, 2t + 1 of token g.
__device__ __forceinline__ uint32_t outputs_of_token(float first, float second) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
  return transpose8(reinterpret_cast<const uint32_t&>(both));
}

// An even number of outputs, rows of them aligned to pairs.
template <Finish FINISH, int COUNT>
__device__ __forceinline__ void store_pairs(const float (&acc)[COUNT], const ExpertGemm& p, const Work& work,
                                            int tile) {
  constexpr bool kGateUp = FINISH != Finish::kPlain;
  const float2 bias = tile_bias<kGateUp>(p, work.expert, tile);
  const int g = lane_index() / 4;
  const int n = (kGateUp ? 8 : 16) * tile + 2 * (lane_index() % 4);
  const int low_count = n < p.rows ? work.count - g : 0;  // tokens g, g + 8, ... of these outputs are stored
  const int high_count = n + 8 < p.rows ? work.count - g : 0;
  auto* to = static_cast<__nv_bfloat16*>(p.out) + static_cast<int64_t>(work.pair + g) * p.out_stride + n;
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) {
    const int token = 2 * i;
    if (token >= work.count) {
      break;
    }
    const float low[2] = {acc[i] + bias.x, acc[i + 1] + bias.x};
    const float high[2] = {acc[i + 2] + bias.y, acc[i + 3] + bias.y};
    if constexpr (kGateUp) {
      const uint32_t outputs = outputs_of_token(finish_gate_up<FINISH>(p.limit, low[0], high[0]),
                                                finish_gate_up<FINISH>(p.limit, low[1], high[1]));
      if (token < low_count) {
        *reinterpret_cast<uint32_t*>(to) = outputs;
      }
    } else {
      const uint32_t first = outputs_of_token(low[0], low[1]);
      const uint32_t second = outputs_of_token(high[0], high[1]);
      if (token < low_count) {
        *reinterpret_cast<uint32_t*>(to) = first;
      }
      if (token < high_count) {
        *reinterpret_cast<uint32_t*>(to + 8) = second;
      }
    }
    to += 8 * p.out_stride;
  }
}

// Eight outputs from n on of eight tokens from `token` on; values of output g and tokens 2t, 2t + 1. Stored as pairs of
// outputs of token g where the rows allow it.
__device__ __forceinline__ void store_group(const ExpertGemm& p, const Work& work, int token, int n, float first,
                                            float second, bool in_pairs) {
  const int g = lane_index() / 4;
  const int t = lane_index() % 4;
  if (in_pairs) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
    const uint32_t outputs = transpose8(reinterpret_cast<const uint32_t&>(both));
    if (token + g < work.count) {
      auto* to =
          static_cast<__nv_bfloat16*>(p.out) + static_cast<int64_t>(work.pair + token + g) * p.out_stride + n + 2 * t;
      if (n + 2 * t + 1 < p.rows) {
        *reinterpret_cast<uint32_t*>(to) = outputs;
      } else if (n + 2 * t < p.rows) {
        *to = reinterpret_cast<const __nv_bfloat162&>(outputs).x;
      }
    }
    return;
  }
  if (n + g < p.rows) {
    if (token + 2 * t < work.count) {
      store_output(p, work.pair + token + 2 * t, n + g, first);
    }
    if (token + 2 * t + 1 < work.count) {
      store_output(p, work.pair + token + 2 * t + 1, n + g, second);
    }
  }
}

// Bias, activation and store.
template <bool GATE_UP, int COUNT>
__device__ __forceinline__ void store_tile(const float (&acc)[COUNT], const ExpertGemm& p, const Work& work, int tile) {
  const int n_low = (GATE_UP ? 8 : 16) * tile;
  const int n_high = GATE_UP ? n_low : n_low + 8;
  const float2 bias = tile_bias<GATE_UP>(p, work.expert, tile);
  const bool in_pairs = !p.out_f32 && (reinterpret_cast<uintptr_t>(p.out) % 4 | p.out_stride % 2) == 0;
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) {
    const int token = 2 * i;
    if (token >= work.count) {
      continue;
    }
    const float low[2] = {acc[i] + bias.x, acc[i + 1] + bias.x};
    const float high[2] = {acc[i + 2] + bias.y, acc[i + 3] + bias.y};
    if constexpr (GATE_UP) {
      store_group(p, work, token, n_low, activate(p.activation, p.limit, low[0], high[0]),
                  activate(p.activation, p.limit, low[1], high[1]), in_pairs);
    } else {
      store_group(p, work, token, n_low, low[0], low[1], in_pairs);
      store_group(p, work, token, n_high, high[0], high[1], in_pairs);
    }
  }
}

// Bias, activation and store of a row tile.
template <bool GATE_UP, int COUNT>
__device__ __forceinline__ void finish_rows(const float (&acc)[COUNT], const ExpertGemm& p, const Work& work,
                                            int tile) {
  const bool in_pairs = !p.out_f32 && (reinterpret_cast<uintptr_t>(p.out) % 4 | p.out_stride % 2 | p.rows % 2) == 0;
  if (!in_pairs) {
    store_tile<GATE_UP>(acc, p, work, tile);
  } else if constexpr (!GATE_UP) {
    store_pairs<Finish::kPlain>(acc, p, work, tile);
  } else if (p.activation == MoeActivation::kSilu) {
    store_pairs<Finish::kSilu>(acc, p, work, tile);
  } else {
    store_pairs<Finish::kClampedSwiglu>(acc, p, work, tile);
  }
}

}  // namespace moelora::sm90
