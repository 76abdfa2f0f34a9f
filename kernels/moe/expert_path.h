// SPDX-License-Identifier: Apache-2.0
// The ways in which the CUDA backend computes an expert product, by name, so that tests and benchmarks can force
// one. The ops choose from the number of rows alone, which is fixed for a captured graph; kAuto has a way for few rows
// (kernels/moe/expert_few.cuh) that has no name of its own.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/moe/moe_down.h"
#include "kernels/moe/moe_gate_up.h"

namespace moelora {

enum class ExpertPath : uint8_t {
  kAuto = 0,
  kFewTokens = 1,      // streams weights: tiles from sm_90 on in bulk (kernels/moe/expert_stream.cuh), else as by 4
  kManyTokens = 2,     // grouped GEMM: on sm_90 by wgmma (kernels/moe/expert_prefill_sm90.cuh), else the next
  kManyTokensMma = 3,  // grouped GEMM by mma.sync (kernels/moe/expert_prefill.cuh)
  // Streams weights past mma.sync (kernels/moe/expert_decode.cuh); shrink and expand as launches of their own, as on
  // GPUs without clusters.
  kFewTokensApart = 4,
  // At most 8 rows, else as kAuto: kernels/moe/expert_few.cuh with the expand as its tail and the shrink in blocks of
  // its own grid (kernels/moe/expert_few_lora.cuh). kAuto's way for one row of MXFP4.
  kFewRowsBeside = 5,
  // As 1, with the deltas of adapters by kernels/moe/expert_delta_stream.cuh where the GPU has the shared memory.
  // kAuto's way for many pairs.
  kFewTokensBlocks = 6,
  // As 2, by wgmma with tokens that come in a certain way: gathered by asynchronous copies of a warp; in bulk, after
  // a launch that arranges them (kernels/moe/expert_tokens.cuh); so by clusters of two blocks that share them. Without
  // scratch for the tokens they are gathered.
  kManyTokensGather = 7,
  kManyTokensBulk = 8,
  kManyTokensPairs = 9,
};
constexpr bool is_many_tokens(ExpertPath path) {
  return path == ExpertPath::kManyTokens || path == ExpertPath::kManyTokensMma ||
         path == ExpertPath::kManyTokensGather || path == ExpertPath::kManyTokensBulk ||
         path == ExpertPath::kManyTokensPairs;
}

// Pairs an expert, on average over all experts, from which kAuto takes kManyTokens.
constexpr int32_t kManyTokensPerExpert = 16;

// Scratch of an expert product of `pairs` pairs with adapters by kFewTokens: shrunk values, deltas, and which there
// are.
constexpr size_t expert_scratch_bytes(size_t pairs, size_t modules, size_t rank_stride, size_t rows) {
  return pairs * modules * (rank_stride + rows + 1) * 4;
}
// Most pairs for which kAuto takes kFewTokens.
constexpr size_t few_token_pairs(size_t num_experts) {
  return kManyTokensPerExpert * num_experts;
}

// Arranged tokens (kernels/moe/expert_tokens.cuh): places for the pairs, every expert from a multiple of 8 on, and
// bytes of scratch behind the shrunk values, in which they begin at a multiple of 128.
constexpr size_t expert_token_places(size_t pairs, size_t experts) {
  return pairs + 8 * experts;
}
constexpr size_t expert_token_bytes(size_t pairs, size_t experts, size_t k) {
  return expert_token_places(pairs, experts) * ((k + 63) / 64) * 128 + 128;
}

void moe_gate_up_cuda_by(ExpertPath path, const MoeGateUpArgs& args, Stream& stream);
void moe_down_cuda_by(ExpertPath path, const MoeDownArgs& args, Stream& stream);

}  // namespace moelora
