// SPDX-License-Identifier: Apache-2.0
// The reference of the experts' second half: pair by pair in sorted order, one output at a time, LoRA and bias
// included.
#include "kernels/moe/moe_down.h"

#include <algorithm>

#include "kernels/lora/lora_reference.h"
#include "kernels/moe/expert_reference.h"

namespace moelora {

void moe_down_cpu(const MoeDownArgs& args, Stream& stream) {
  check_lora_scratch(args.lora, stream);
  check_expert_weights(args.down);
  const float* const act = args.act.f32();
  float* const out = args.out.f32();
  const ExpertWeights& down = args.down;
  const size_t pairs = static_cast<size_t>(args.num_rows) * static_cast<size_t>(args.top_k);
  stream.parallel_for(pairs, [&](size_t i, int worker) {
    const int32_t* begin = args.order.expert_begin;
    const int32_t* after = std::upper_bound(begin, begin + args.num_experts, static_cast<int32_t>(i));
    const auto expert = static_cast<int32_t>(after - begin) - 1;
    const int32_t row = args.order.pair_row[i];
    const float* from = act + static_cast<int64_t>(i) * args.act.stride;
    float* to = out + static_cast<int64_t>(i) * args.out.stride;
    auto* shrunk = reinterpret_cast<float*>(stream.scratch(worker));
    const LoraRow lora = lora_row_expert(args.lora, row, args.layer, expert, ExpertModule::kDown);
    if (lora.active()) {
      lora_shrink_reference(lora, from, down.cols, shrunk);
    }
    for (int32_t n = 0; n < down.rows; ++n) {
      const float y = expert_dot_reference(down, expert, args.compute, n, from);
      to[n] = lora_expand_reference(lora, shrunk, n, y) + expert_bias(down, expert, n);
    }
  });
}

}  // namespace moelora
