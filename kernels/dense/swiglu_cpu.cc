// SPDX-License-Identifier: Apache-2.0
// The reference SwiGLU of the dense MLP: element by element, the exponential in double.
#include "kernels/dense/swiglu.h"

#include <cmath>

namespace moelora {

void swiglu_cpu(const SwigluArgs& args, Stream& stream) {
  const float* const gate = args.gate.f32();
  const float* const up = args.up.f32();
  const Rows& out = args.out.data != nullptr ? args.out : args.gate;
  stream.parallel_for(static_cast<size_t>(args.num_rows), [&](size_t t, int) {
    float* to = out.row(static_cast<int64_t>(t));
    const float* g = gate + static_cast<int64_t>(t) * args.gate.stride;
    const float* u = up + static_cast<int64_t>(t) * args.up.stride;
    for (int32_t i = 0; i < args.width; ++i) {
      const auto z = static_cast<double>(g[i]);
      to[i] = static_cast<float>(z / (1.0 + std::exp(-z)) * static_cast<double>(u[i]));
    }
  });
}

}  // namespace moelora
