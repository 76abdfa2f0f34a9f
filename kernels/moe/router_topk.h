// SPDX-License-Identifier: Apache-2.0
// router_topk: which K experts a row uses and with what weight.
// kSoftmax: p = softmax over all E logits, the K largest, divided by their sum if renormalize (which equals
// softmax over the chosen logits). Ties go to the lower index. ids are in order of falling score.
// Selection is on fp32 logits (softmax is monotonic, so comparing logits avoids ties made by rounding).
#pragma once

#include "kernels/base/stream.h"
#include "kernels/base/tensor.h"

namespace moelora {

enum class RouterScore : uint8_t { kSoftmax = 0 };

struct RouterTopkArgs {
  Rows logits;  // [T, E] fp32; base + bias + LoRA
  int32_t num_rows = 0;
  int32_t num_experts = 0;
  int32_t top_k = 0;
  RouterScore score = RouterScore::kSoftmax;
  bool renormalize = false;
  int32_t* ids = nullptr;    // [T, K]
  float* weights = nullptr;  // [T, K]
};

void router_topk_cpu(const RouterTopkArgs& args, Stream& stream);
void router_topk_cuda(const RouterTopkArgs& args, Stream& stream);

}  // namespace moelora
