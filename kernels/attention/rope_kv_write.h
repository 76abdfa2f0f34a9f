// SPDX-License-Identifier: Apache-2.0
// rope_kv_write: for each row: clamp q, k, v to +-clip (OLMoE); RMSNorm over each head of q and k (Qwen3);
// rotate q and k; write k and v into the row's KV block. q is updated in place; k and v are scratch after.
// Half-split pairs: (x_i, x_{i+D/2}) -> (a cos - b sin, b cos + a sin), angle = position * inv_freq[i], cos and
// sin times rope_scale (YaRN). Angles, cos and sin in fp32 (transformers computes them so).
#pragma once

#include "kernels/attention/kv_view.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor.h"

namespace moelora {

struct RopeKvWriteArgs {
  Rows q;  // [T, Nq * D]
  Rows k;  // [T, Nkv * D]
  Rows v;  // [T, Nkv * D]
  int32_t num_rows = 0;
  int32_t num_heads = 0;  // Nq; Nkv and D are in kv.layout
  float clip = 0.0f;      // 0 = none
  Weight q_norm;          // [1, D] or empty
  Weight k_norm;          // [1, D] or empty
  float eps = 0.0f;
  const float* inv_freq = nullptr;  // [D / 2]
  float rope_scale = 1.0f;
  const int32_t* positions = nullptr;     // [T]
  const int32_t* row_sequence = nullptr;  // [T] index into kv.block_tables
  KvView kv;
  int32_t layer = 0;
};

void rope_kv_write_cpu(const RopeKvWriteArgs& args, Stream& stream);
void rope_kv_write_cuda(const RopeKvWriteArgs& args, Stream& stream);  // q, k, v fp32; KV bf16

}  // namespace moelora
