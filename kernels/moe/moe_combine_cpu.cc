// SPDX-License-Identifier: Apache-2.0
// The reference combine: each row gathers its K expert results in the order of its choices, adds the shared
// expert's, then the residual. Sums of a row in fp32 in a fixed order.
#include "kernels/moe/moe_combine.h"

#include <cmath>

namespace moelora {

void moe_combine_cpu(const MoeCombineArgs& args, Stream& stream) {
  const float* const down = args.down.f32();
  float* const hidden = args.hidden.f32();
  const float* const shared = args.shared.data != nullptr ? args.shared.f32() : nullptr;
  const float* const shared_gate = args.shared_gate.data != nullptr ? args.shared_gate.f32() : nullptr;
  stream.parallel_for(static_cast<size_t>(args.num_rows), [&](size_t row, int) {
    const auto t = static_cast<int64_t>(row);
    float* to = hidden + t * args.hidden.stride;
    float gate = 1.0f;
    if (shared_gate != nullptr) {
      gate = static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(shared_gate[t * args.shared_gate.stride]))));
    }
    for (int32_t i = 0; i < args.width; ++i) {
      float sum = 0.0f;
      for (int32_t j = 0; j < args.top_k; ++j) {
        const int64_t pair = t * args.top_k + j;
        sum += args.weights[pair] * down[args.order.pair_position[pair] * args.down.stride + i];
      }
      if (shared != nullptr) {
        sum += gate * shared[t * args.shared.stride + i];
      }
      to[i] += sum;
    }
  });
  if (args.normed.data != nullptr) {
    rms_norm_cpu(combine_norm(args), stream);
  }
}

}  // namespace moelora
