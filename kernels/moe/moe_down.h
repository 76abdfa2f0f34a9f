// SPDX-License-Identifier: Apache-2.0
// moe_down: the experts' second half: out[i, :] = D_e act[i, :] + s(t) B (A act[i, :]) [+ s lora_bias] + bias_e,
// pairs in sorted order; router weights are applied by moe_combine. Row invariance as in linear.h.
#pragma once

#include "kernels/moe/moe_gate_up.h"

namespace moelora {

struct MoeDownArgs {
  Rows act;            // [T * K, I], sorted order
  ExpertWeights down;  // [H, I] each
  MoeOrder order;      // CUDA: complete before the op that makes `act` was queued
  int32_t num_rows = 0;  // T
  int32_t top_k = 0;
  int32_t num_experts = 0;
  int32_t layer = 0;
  const LoraBatch* lora = nullptr;  // may be null
  Compute compute = Compute::kExact;
  Rows out;                      // [T * K, H], sorted order
  std::byte* scratch = nullptr;  // >= linear_scratch_bytes(T * K, I, lora pairs, max_rank); CUDA may use more of it
  size_t scratch_bytes = 0;
  LoraAhead ahead;
};

void moe_down_cpu(const MoeDownArgs& args, Stream& stream);  // reference
void moe_down_simd(const MoeDownArgs& args, Stream& stream);
void moe_down_cuda(const MoeDownArgs& args, Stream& stream);  // act bf16, out bf16

}  // namespace moelora
