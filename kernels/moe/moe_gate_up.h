// SPDX-License-Identifier: Apache-2.0
// moe_gate_up: the experts' first half for all sorted pairs, LoRA added before the activation.
//
//   pair i of row t and expert e, g = G_e x_t + s(t) B^g (A^g x_t) [+ s lora_bias] + gate_bias_e, u likewise with U_e,
//   kSilu:          act[i, :] = silu(g) * u
//   kClampedSwiglu: g = min(g, limit), u = clamp(u, -limit, limit), act[i, :] = (u + 1) * g * sigmoid(1.702 g)
// s(t) = row_scale[t] * record.scale. Rows of experts come through MoeOrder; act is in sorted order.
// A pair's bits depend on its row alone (CPU backend), as in linear.h.
#pragma once

#include "kernels/base/stream.h"
#include "kernels/base/tensor.h"
#include "kernels/lora/adapter_layout.h"
#include "kernels/moe/expert_weights.h"
#include "kernels/moe/moe_sort.h"

namespace moelora {

struct MoeGateUpArgs {
  Rows x;              // [T, H]
  ExpertWeights gate;  // [I, H] each
  ExpertWeights up;    // [I, H] each
  MoeOrder order;
  int32_t num_rows = 0;  // T
  int32_t top_k = 0;
  int32_t num_experts = 0;
  int32_t layer = 0;
  const LoraBatch* lora = nullptr;  // may be null
  Compute compute = Compute::kExact;
  MoeActivation activation = MoeActivation::kSilu;
  float limit = 0.0f;            // kClampedSwiglu
  Rows act;                      // [T * K, I]
  std::byte* scratch = nullptr;  // >= linear_scratch_bytes(T, H, lora pairs, max_rank); CUDA may use more of it
  size_t scratch_bytes = 0;
};

void moe_gate_up_cpu(const MoeGateUpArgs& args, Stream& stream);  // reference
void moe_gate_up_simd(const MoeGateUpArgs& args, Stream& stream);
void moe_gate_up_cuda(const MoeGateUpArgs& args, Stream& stream);  // x bf16, act bf16

}  // namespace moelora
