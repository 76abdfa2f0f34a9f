// SPDX-License-Identifier: Apache-2.0
// How nearly a row's router would have chosen other experts: what `moelora verify` needs to tell a near-tie from an
// error. Host memory only; nothing of it runs unless a request of the batch captures its logits.
#pragma once

#include <cstdint>

#include "kernels/base/tensor.h"

namespace moelora {

// gaps[t] = min(gaps[t], (smallest chosen logit - largest other one) / largest |logit| of the row). `expert_ids`
// [num_rows, top_k] are the chosen. Rows without another expert keep their gap.
void narrow_router_gaps(const Rows& router_logits, const int32_t* expert_ids, int32_t num_rows, int32_t num_experts,
                        int32_t top_k, float* gaps);

}  // namespace moelora
