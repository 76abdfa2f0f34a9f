// SPDX-License-Identifier: Apache-2.0
// moe_route: from the router's logits to the order in which the experts take their pairs: router_topk, and moe_sort of
// the ids it gives, in one op. Everything that those two promise holds, bits included.
#pragma once

#include "kernels/base/stream.h"
#include "kernels/moe/moe_sort.h"
#include "kernels/moe/router_topk.h"

namespace moelora {

struct MoeRouteArgs {
  RouterTopkArgs topk;
  const int32_t* row_slot = nullptr;  // [T] or null = all base
  MoeOrder order;
};

inline MoeSortArgs route_sort(const MoeRouteArgs& args) {
  return {args.topk.ids, args.row_slot, args.topk.num_rows, args.topk.top_k, args.topk.num_experts, args.order};
}

void moe_route_cpu(const MoeRouteArgs& args, Stream& stream);
void moe_route_cuda(const MoeRouteArgs& args, Stream& stream);

}  // namespace moelora
