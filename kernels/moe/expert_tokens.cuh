// SPDX-License-Identifier: Apache-2.0
// The tokens of an expert product as its stages in shared memory want them (kernels/cuda/wgmma.cuh), so that a tile's
// share of 64 inputs is one contiguous piece and one bulk copy: [block of 64 inputs][place] rows of 128 bytes, piece u
// of 16 bytes of place r at u ^ (r % 8), zeros past k. Places are sorted pairs, but that every expert begins at a
// multiple of 8; what lies between the experts is not written.
// A warp copies a pair: it reads the row in one go and writes whole lines. Limited by the memory it writes; rows that
// several pairs share come from the L2.
#pragma once

#include "kernels/moe/expert_gemm.cuh"

namespace moelora {

constexpr int kTokenWarps = 8;  // of a block, a pair each

// The place of a sorted pair of `expert`, whose pairs begin at `begin`: experts' places do not overlap, since
// 8 (begin / 8 + expert) grows by at least 8 + count - 7 from one expert to the next.
__device__ __forceinline__ int token_place(int pair, int expert, int begin) {
  return pair + 8 * expert - begin % 8;
}

// By whole warps.
__device__ __forceinline__ int expert_of_pair(const int32_t* expert_begin, int num_experts, int pair) {
  int expert = 0;  // experts that end at or before the pair
  for (int first = 0; first < num_experts; first += 32) {
    const int e = first + lane_index();
    expert += __popc(__ballot_sync(0xffffffffu, e < num_experts && __ldg(expert_begin + e + 1) <= pair));
  }
  return expert;
}

template <bool GATE_UP>
__global__ void __launch_bounds__(32 * kTokenWarps)
    arrange_tokens(const __grid_constant__ ExpertGemm p, uint4* out, int num_pairs, int num_experts) {
  constexpr int kTogether = 4;  // pieces a lane that are on their way together
  wait_for_previous();
  const int pair = static_cast<int>(blockIdx.x) * kTokenWarps + warp_index();
  if (pair >= num_pairs) {
    return;
  }
  const uint4* const from = token_row(p, pair);
  const int expert = expert_of_pair(p.order.expert_begin, num_experts, pair);
  const int place = token_place(pair, expert, __ldg(p.order.expert_begin + expert));
  const int chunks = p.k / 8;
  const int pieces = 8 * p.k_blocks;
  uint4* const to = out + int64_t{place} * 8 + (lane_index() % 8 ^ place % 8);
  const int64_t block = int64_t{p.token_places} * 8;
  for (int first = lane_index(); first < pieces; first += 32 * kTogether) {
    uint4 values[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int at = first + 32 * i;
      values[i] = at < chunks ? __ldg(from + at) : zero_chunk();
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int at = first + 32 * i;
      if (at < pieces) {
        to[at / 8 * block] = values[i];
      }
    }
  }
}

// Into p.token_room, which is there. The product that follows on the stream finds them.
template <bool GATE_UP>
void launch_arrange_tokens(const ExpertGemm& p, int64_t num_pairs, int num_experts, const CudaStream& state) {
  const auto blocks = static_cast<unsigned>((num_pairs + kTokenWarps - 1) / kTokenWarps);
  launch_dependent(arrange_tokens<GATE_UP>, dim3(blocks), 32 * kTokenWarps, 0, state, p,
                   reinterpret_cast<uint4*>(p.token_room), static_cast<int>(num_pairs), num_experts);
}

}  // namespace moelora
