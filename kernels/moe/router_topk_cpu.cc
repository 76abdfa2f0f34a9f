// SPDX-License-Identifier: Apache-2.0
// The router_topk of every CPU backend. A row keeps its K best so far in the output arrays, sorted; an expert is
// compared with the last of them first, so nearly all of the E experts cost one comparison. The softmax then needs
// the largest logit, which is the first of the chosen.
#include "kernels/moe/router_topk.h"

#include <cmath>
#include <limits>

#include "kernels/base/top_list.h"

namespace moelora {
namespace {

// ids and best: the K largest logits in falling order. False if the row holds a NaN.
bool choose(const float* logits, int32_t num_experts, int32_t top_k, int32_t* ids, float* best) {
  bool clean = true;
  TopList list(top_k, best, ids);
  for (int32_t e = 0; e < num_experts; ++e) {
    const bool is_nan = std::isnan(logits[e]);
    clean = clean && !is_nan;
    list.offer(is_nan ? -std::numeric_limits<float>::infinity() : logits[e], e);
  }
  return clean;
}

// Chosen logits in `weights` become probabilities.
void softmax(const float* logits, const RouterTopkArgs& args, float* weights) {
  const float largest = weights[0];
  const float* over = args.renormalize ? weights : logits;
  const int32_t count = args.renormalize ? args.top_k : args.num_experts;
  double sum = 0.0;
  for (int32_t i = 0; i < count; ++i) {
    sum += static_cast<double>(std::exp(over[i] - largest));
  }
  for (int32_t j = 0; j < args.top_k; ++j) {
    weights[j] = static_cast<float>(static_cast<double>(std::exp(weights[j] - largest)) / sum);
  }
}

}  // namespace

void router_topk_cpu(const RouterTopkArgs& args, Stream& stream) {
  MOELORA_ASSERT(args.top_k >= 1 && args.top_k <= args.num_experts);
  const float* const logits = args.logits.f32();
  stream.parallel_for(static_cast<size_t>(args.num_rows), [&](size_t row, int) {
    const auto t = static_cast<int64_t>(row);
    const float* from = logits + t * args.logits.stride;
    float* weights = args.weights + t * args.top_k;
    if (choose(from, args.num_experts, args.top_k, args.ids + t * args.top_k, weights)) {
      softmax(from, args, weights);
    } else {
      // A poisoned row must reach the sampler as NaN, whichever experts it lost.
      for (int32_t j = 0; j < args.top_k; ++j) {
        weights[j] = std::numeric_limits<float>::quiet_NaN();
      }
    }
  });
}

}  // namespace moelora
