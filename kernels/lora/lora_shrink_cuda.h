// SPDX-License-Identifier: Apache-2.0
// lora_shrink on CUDA: the first half of every delta, scaled, for the ops that expand it (linear, moe_gate_up,
// moe_down).
//
//   out[i, m, r] = row_scale[t] * record.scale * sum_k A_m[r, k] x[row, k]
// fp32 (experts: or bf16), r < rank rounded up to 8 (zeros beyond the rank); for pairs or rows of slot 0, and for
// modules that the adapter does not have, nothing is written. bf16 streams only. Each value is summed in an order fixed
// by K and the way taken.
#pragma once

#include "kernels/base/stream.h"
#include "kernels/base/tensor.h"
#include "kernels/lora/adapter_layout.h"
#include "kernels/moe/moe_sort.h"

namespace moelora {

// Rows of a batch against the dense records of a layer. out [T, num_modules, rank_stride].
struct DenseShrinkArgs {
  Rows x;  // [T, K] bf16
  int32_t num_rows = 0;
  int32_t k = 0;
  int32_t layer = 0;
  LoraModule modules[3] = {LoraModule::kNone, LoraModule::kNone, LoraModule::kNone};
  int32_t num_modules = 0;
  const LoraBatch* lora = nullptr;  // not null
  float* out = nullptr;
  int32_t rank_stride = 0;  // floats, multiple of 8, >= any rank
  // CudaStream's, for 9 to 64 rows on sm_90: the next kernel begins beside this one, is told that x is there, and
  // clears the count.
  uint32_t* x_ready = nullptr;
};
void lora_shrink_dense_cuda(const DenseShrinkArgs& args, Stream& stream);

// Sorted pairs against the expert records of a layer. out [P, num_modules, rank_stride].
struct ExpertShrinkArgs {
  Rows x;  // bf16, [T, K] by row, or [P, K] in sorted order
  bool x_sorted = false;
  MoeOrder order;
  int32_t num_rows = 0;
  int32_t top_k = 0;
  int32_t num_experts = 0;
  int32_t k = 0;
  int32_t layer = 0;
  ExpertModule modules[2] = {ExpertModule::kGate, ExpertModule::kUp};
  int32_t num_modules = 0;
  const LoraBatch* lora = nullptr;  // not null
  float* out = nullptr;
  bool out_bf16 = false;  // out holds bf16, each value rounded once
  int32_t rank_stride = 0;
};
void lora_shrink_experts_cuda(const ExpertShrinkArgs& args, Stream& stream);

}  // namespace moelora
