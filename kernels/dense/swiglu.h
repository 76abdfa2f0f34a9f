// SPDX-License-Identifier: Apache-2.0
// swiglu: out[t, i] = silu(gate[t, i]) * up[t, i], silu(z) = z / (1 + exp(-z)), in fp32.
#pragma once

#include "kernels/base/stream.h"
#include "kernels/base/tensor.h"

namespace moelora {

struct SwigluArgs {
  Rows gate;  // [T, width] fp32
  Rows up;    // [T, width] fp32
  int32_t num_rows = 0;
  int32_t width = 0;
  Rows out;  // [T, width]; data == null or the gate's: in place
};

void swiglu_cpu(const SwigluArgs& args, Stream& stream);   // reference
void swiglu_simd(const SwigluArgs& args, Stream& stream);
void swiglu_cuda(const SwigluArgs& args, Stream& stream);  // out fp32 or bf16

}  // namespace moelora
