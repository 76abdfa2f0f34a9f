// SPDX-License-Identifier: Apache-2.0
// linear: up to three projections of the same rows, each with its LoRA, in one op.
//
//   y[t, n] = sum_k W[n, k] x[t, k]  +  s(t) * sum_r B[n, r] (sum_k A[r, k] x[t, k])  + s(t) * lora_bias[n]
//             + bias[n]                                      (+ out[t, n] if accumulate)
// with s(t) = row_scale[t] * record.scale, in fp32, in this order; a row of slot 0 or scale 0 gets exactly
// the base's bits. Accumulation in fp32; the delta is computed from the unrounded activations in kExact.
// Row invariance: on the CPU backend a row's bits depend on that row alone (every sum over k runs in an
// order fixed by K and dtype), so results never depend on neighbours or on T.
// Used for q/k/v, o, gate/up, down, router, shared experts, shared_expert_gate, lm_head.
#pragma once

#include "kernels/base/stream.h"
#include "kernels/base/tensor.h"
#include "kernels/lora/adapter_layout.h"

namespace moelora {

struct LinearPart {
  Weight weight;                          // [N, K]
  Weight bias;                            // [1, N] or empty
  Rows out;                               // [T, N], fp32
  LoraModule module = LoraModule::kNone;  // kNone: never adapted
};

struct LinearArgs {
  Rows x;  // [T, K]
  int32_t num_rows = 0;
  int32_t k = 0;
  LinearPart parts[3];
  int32_t num_parts = 0;
  bool accumulate = false;  // out += instead of out =
  int32_t layer = 0;
  const LoraBatch* lora = nullptr;  // may be null
  Compute compute = Compute::kExact;
  std::byte* scratch = nullptr;  // >= linear_scratch_bytes(...), 64-byte aligned
  size_t scratch_bytes = 0;
  LoraAhead ahead;
};

// Whether any of the op's outputs can have a delta.
inline bool has_lora(const LinearArgs& args) {
  bool any = false;
  for (int p = 0; p < args.num_parts; ++p) {
    any = any || args.parts[p].module != LoraModule::kNone;
  }
  return args.lora != nullptr && any;
}

// Enough for any linear (and moe_gate_up, moe_down) op of `rows` rows of width `k` with `lora_rows`
// adapter rows of rank <= `max_rank`: packed activations and the shrunk rows of three parts.
constexpr size_t linear_scratch_bytes(size_t rows, size_t k, size_t lora_rows, size_t max_rank) {
  return rows * ((k + 63) / 64 * 64) * 4 + 3 * lora_rows * ((max_rank + 15) / 16 * 16 + 16) * 4 + 4096;
}

inline double linear_flops(const LinearArgs& args) {
  double n = 0;
  for (int p = 0; p < args.num_parts; ++p) {
    n += args.parts[p].weight.rows;
  }
  return 2.0 * args.num_rows * args.k * n;
}
inline double linear_bytes(const LinearArgs& args) {
  double bytes = 4.0 * args.num_rows * args.k;
  for (int p = 0; p < args.num_parts; ++p) {
    const LinearPart& part = args.parts[p];
    bytes += static_cast<double>(part.weight.rows) * args.k * static_cast<double>(dtype_bytes(part.weight.dtype)) +
             4.0 * args.num_rows * part.weight.rows;
  }
  return bytes;
}

void linear_cpu(const LinearArgs& args, Stream& stream);  // reference
void linear_simd(const LinearArgs& args, Stream& stream);
void linear_cuda(const LinearArgs& args, Stream& stream);  // x bf16, out fp32 or bf16; weights bf16 or fp32

}  // namespace moelora
