// SPDX-License-Identifier: Apache-2.0
// swiglu: gate[t, i] = silu(gate[t, i]) * up[t, i], silu(z) = z / (1 + exp(-z)), in fp32, in place.
#pragma once

#include "kernels/base/stream.h"
#include "kernels/base/tensor.h"

namespace moelora {

struct SwigluArgs {
  Rows gate;  // [T, width], overwritten
  Rows up;    // [T, width]
  int32_t num_rows = 0;
  int32_t width = 0;
};

void swiglu_cpu(const SwigluArgs& args, Stream& stream);   // reference
void swiglu_simd(const SwigluArgs& args, Stream& stream);

}  // namespace moelora
