// SPDX-License-Identifier: Apache-2.0
#include "runtime/model/router_gap.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace moelora {

void narrow_router_gaps(const Rows& router_logits, const int32_t* expert_ids, int32_t num_rows, int32_t num_experts,
                        int32_t top_k, float* gaps) {
  if (top_k >= num_experts) {
    return;
  }
  for (int32_t t = 0; t < num_rows; ++t) {
    const float* logits = router_logits.row(t);
    const int32_t* chosen = expert_ids + static_cast<int64_t>(t) * top_k;
    float last_in = std::numeric_limits<float>::infinity();
    float first_out = -last_in;
    float largest = 0;
    for (int32_t expert = 0; expert < num_experts; ++expert) {
      const bool is_chosen = std::find(chosen, chosen + top_k, expert) != chosen + top_k;
      last_in = is_chosen ? std::min(last_in, logits[expert]) : last_in;
      first_out = is_chosen ? first_out : std::max(first_out, logits[expert]);
      largest = std::max(largest, std::abs(logits[expert]));
    }
    // All logits zero: every choice is a tie.
    gaps[t] = std::min(gaps[t], largest > 0 ? (last_in - first_out) / largest : 0.0f);
  }
}

}  // namespace moelora
