// SPDX-License-Identifier: Apache-2.0
// The moe_router of the CPU backends: where an op costs no launch, three are as good as one.
#include "kernels/moe/moe_router.h"

namespace moelora {

void moe_router_cpu(const MoeRouterArgs& args, Stream& stream) {
  rms_norm_cpu(args.norm, stream);
  linear_cpu(args.router, stream);
  moe_route_cpu(args.route, stream);
}

void moe_router_simd(const MoeRouterArgs& args, Stream& stream) {
  rms_norm_simd(args.norm, stream);
  linear_simd(args.router, stream);
  moe_route_cpu(args.route, stream);
}

}  // namespace moelora
