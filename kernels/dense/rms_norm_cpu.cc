// SPDX-License-Identifier: Apache-2.0
// The reference RMSNorm: mean of squares in double, then one multiplication by the reciprocal root and one by the
// weight, both rounded to fp32 as in the contract.
#include "kernels/dense/rms_norm.h"

#include <cmath>

namespace moelora {

void rms_norm_cpu(const RmsNormArgs& args, Stream& stream) {
  const float* const x = args.x.f32();
  float* const out = args.out.f32();
  stream.parallel_for(static_cast<size_t>(args.num_rows), [&](size_t t, int) {
    const int64_t source = args.row_index != nullptr ? args.row_index[t] : static_cast<int64_t>(t);
    const float* from = x + source * args.x.stride;
    float* to = out + static_cast<int64_t>(t) * args.out.stride;
    double squares = 0.0;
    for (int32_t i = 0; i < args.width; ++i) {
      squares += static_cast<double>(from[i]) * static_cast<double>(from[i]);
    }
    const double mean = squares / args.width;
    const auto scale = static_cast<float>(1.0 / std::sqrt(mean + static_cast<double>(args.eps)));
    for (int32_t i = 0; i < args.width; ++i) {
      to[i] = from[i] * scale * load_element(args.weight.data, args.weight.dtype, static_cast<size_t>(i));
    }
  });
}

}  // namespace moelora
