// SPDX-License-Identifier: Apache-2.0
// moe_router: a layer's way from the residual to the order in which the experts take their pairs, rms_norm, linear and
// moe_route in one op. It is exactly the three one after the other: everything that they promise holds, bits included,
// and everything that they write is written, the normed rows (which the experts read) and the logits, too.
#pragma once

#include "kernels/base/stream.h"
#include "kernels/dense/linear.h"
#include "kernels/dense/rms_norm.h"
#include "kernels/moe/moe_route.h"

namespace moelora {

struct MoeRouterArgs {
  RmsNormArgs norm;
  LinearArgs router;   // of norm.out; one part
  MoeRouteArgs route;  // of the router's logits
};

void moe_router_cpu(const MoeRouterArgs& args, Stream& stream);  // of the reference's ops
void moe_router_simd(const MoeRouterArgs& args, Stream& stream);
void moe_router_cuda(const MoeRouterArgs& args, Stream& stream);

}  // namespace moelora
