// SPDX-License-Identifier: Apache-2.0
// The table of the CPU backend: vector kernels where they pay, the reference loops for the ops that move little.
#include "kernels/kernels.h"

namespace moelora {

const Kernels& kernels_cpu() {
  static const Kernels table = [] {
    Kernels kernels = kernels_reference();
    kernels.name = "cpu";
    kernels.rms_norm = rms_norm_simd;
    kernels.linear = linear_simd;
    kernels.swiglu = swiglu_simd;
    kernels.paged_attention = paged_attention_simd;
    kernels.moe_router = moe_router_simd;
    kernels.moe_gate_up = moe_gate_up_simd;
    kernels.moe_down = moe_down_simd;
    kernels.moe_combine = moe_combine_simd;
    kernels.read_memory = read_memory_simd;
    return kernels;
  }();
  return table;
}

}  // namespace moelora
