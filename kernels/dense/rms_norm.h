// SPDX-License-Identifier: Apache-2.0
// rms_norm: out[t, :] = x[i(t), :] / sqrt(mean(x[i(t), :]^2) + eps) * weight, in fp32; i(t) = row_index[t], or
// t where row_index is null. In place is allowed when row_index is null. A row's bits depend on it alone.
// (Zhang and Sennrich 2019; the weight multiplies after normalisation, as in Llama.)
#pragma once

#include "kernels/base/stream.h"
#include "kernels/base/tensor.h"

namespace moelora {

struct RmsNormArgs {
  Rows x;                              // [*, width]
  const int32_t* row_index = nullptr;  // [T] or null
  Weight weight;                       // [1, width]
  float eps = 0.0f;
  int32_t num_rows = 0;
  int32_t width = 0;
  Rows out;                            // [T, width]
};

inline double rms_norm_bytes(const RmsNormArgs& args) { return 8.0 * args.num_rows * args.width; }

void rms_norm_cpu(const RmsNormArgs& args, Stream& stream);   // reference
void rms_norm_simd(const RmsNormArgs& args, Stream& stream);
// In builds with CUDA: x and out fp32 or bf16, the weight aligned to its element.
void rms_norm_cuda(const RmsNormArgs& args, Stream& stream);

}  // namespace moelora
