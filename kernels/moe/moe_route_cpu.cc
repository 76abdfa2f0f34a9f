// SPDX-License-Identifier: Apache-2.0
// The moe_route of every CPU backend: where an op costs no launch, two are as good as one.
#include "kernels/moe/moe_route.h"

namespace moelora {

void moe_route_cpu(const MoeRouteArgs& args, Stream& stream) {
  router_topk_cpu(args.topk, stream);
  moe_sort_cpu(route_sort(args), stream);
}

}  // namespace moelora
