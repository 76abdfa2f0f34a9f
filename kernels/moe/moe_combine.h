// SPDX-License-Identifier: Apache-2.0
// moe_combine: hidden[t] += sum_j weights[t, j] * down[position(t, j)]  (+ sigmoid(shared_gate[t]) * shared[t], or
// + shared[t] where shared_gate is empty). j ascending, fp32.
// Where `normed` is wanted, then also normed[t] = rms_norm(hidden[t]), bit for bit as that op gives it: the input of
// what follows the layer, without a launch for it.
#pragma once

#include "kernels/base/stream.h"
#include "kernels/base/tensor.h"
#include "kernels/dense/rms_norm.h"
#include "kernels/moe/moe_sort.h"

namespace moelora {

// CUDA: weights, order and hidden were complete before the moe_down that makes `down` was queued.
struct MoeCombineArgs {
  Rows down;                       // [T * K, H], sorted order
  const float* weights = nullptr;  // [T, K]
  MoeOrder order;
  int32_t num_rows = 0;
  int32_t top_k = 0;
  int32_t width = 0;   // H
  Rows shared;         // [T, H] or data == null
  Rows shared_gate;    // [T, 1] or data == null
  Rows hidden;         // [T, H], accumulated
  Weight norm_weight;  // [1, H]; unused where normed is not wanted
  float norm_eps = 0.0f;
  Rows normed;  // [T, H], other memory than hidden, or data == null: not wanted
};

// The norm of an op whose `normed` is wanted.
inline RmsNormArgs combine_norm(const MoeCombineArgs& args) {
  return {args.hidden, nullptr, args.norm_weight, args.norm_eps, args.num_rows, args.width, args.normed};
}

void moe_combine_cpu(const MoeCombineArgs& args, Stream& stream);  // reference
void moe_combine_simd(const MoeCombineArgs& args, Stream& stream);
void moe_combine_cuda(const MoeCombineArgs& args, Stream& stream);  // down, normed bf16 or fp32; else fp32

}  // namespace moelora
