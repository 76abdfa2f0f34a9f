// SPDX-License-Identifier: Apache-2.0
// moe_router on CUDA. Up to 8 rows of a router without adapters: one launch, kernels/moe/moe_router_few.cuh, where the
// GPU has clusters and the shape fits. Anything else: the three ops.
#include <algorithm>
#include <cstdint>

#include "kernels/moe/moe_router_few.cuh"
#include "kernels/moe/router_path.h"

namespace moelora {
namespace {

using namespace router_few;

bool is_aligned(const void* address, size_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

// Whether the three ops are of one another, and of a shape that the kernel has.
bool fits(const MoeRouterArgs& args) {
  const RmsNormArgs& norm = args.norm;
  const LinearArgs& router = args.router;
  const LinearPart& part = router.parts[0];
  const RouterTopkArgs& topk = args.route.topk;
  const MoeOrder& order = args.route.order;
  const bool one = norm.num_rows == router.num_rows && norm.num_rows == topk.num_rows && norm.width == router.k &&
                   router.num_parts == 1 && !router.accumulate && norm.out.data == router.x.data &&
                   norm.out.stride == router.x.stride && router.x.dtype == Dtype::kBf16 &&
                   part.out.data == topk.logits.data && part.out.stride == topk.logits.stride &&
                   part.weight.rows == topk.num_experts && part.weight.cols == router.k;
  const bool rows = norm.x.dtype == Dtype::kF32 && norm.x.stride % 4 == 0 && is_aligned(norm.x.data, 16) &&
                    norm.row_index == nullptr && norm.out.dtype == Dtype::kBf16 && norm.out.stride % 8 == 0 &&
                    is_aligned(norm.out.data, 16) && part.out.dtype == Dtype::kF32;
  const bool weights = norm.weight.dtype != Dtype::kF16 && is_aligned(norm.weight.data, 16) &&
                       part.weight.dtype == Dtype::kBf16 && is_aligned(part.weight.data, 16) &&
                       (part.bias.empty() || part.bias.dtype != Dtype::kF16);
  const bool routing = topk.top_k >= 1 && topk.top_k <= std::min(topk.num_experts, kMaxTopK) &&
                       topk.score == RouterScore::kSoftmax && order.active_experts != nullptr &&
                       order.num_active != nullptr;
  return one && rows && weights && routing && !has_lora(router) && norm.num_rows <= kMaxRows && norm.width % 8 == 0 &&
         norm.width <= kMaxSteps * kStep && topk.num_experts <= kMaxExperts;
}

Params params_of(const MoeRouterArgs& args) {
  const LinearPart& part = args.router.parts[0];
  Params p{};
  p.x = args.norm.x.f32();
  p.x_stride = args.norm.x.stride;
  p.norm_weight = static_cast<const std::byte*>(args.norm.weight.data);
  p.norm_f32 = args.norm.weight.dtype == Dtype::kF32;
  p.eps = args.norm.eps;
  p.normed = static_cast<__nv_bfloat16*>(args.norm.out.data);
  p.normed_stride = args.norm.out.stride;
  p.num_rows = args.norm.num_rows;
  p.k = args.norm.width;
  p.router.weight = part.weight.data;
  p.router.bias = part.bias.data;
  p.router.bias_f32 = part.bias.dtype == Dtype::kF32;
  p.router.out = part.out.data;
  p.router.out_stride = part.out.stride;
  p.router.out_f32 = true;
  p.router.n = part.weight.rows;
  p.route = args.route;
  return p;
}

template <int STEPS, int TILE, int PER_LANE, bool MANY>
bool launch(const Params& p, const CudaStream& state) {
  constexpr auto kKernel = router_kernel<STEPS, TILE, PER_LANE, MANY>;
  static const bool compiled = has_code(kKernel);
  if (!compiled) {
    return false;
  }
  check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout<STEPS>::bytes(kMaxRows)),
             "shared memory of the router");
  prefer_shared(kKernel, linear::kSharedPercent);
  // A power of two; blocks without an expert give nothing. Not one block alone, which would send its logits to itself:
  // that is for clusters.
  unsigned cluster = 2;
  while (static_cast<int>(cluster) * TILE < p.router.n) {
    cluster *= 2;
  }
  const auto shared = static_cast<size_t>(Layout<STEPS>::bytes(p.num_rows));
  launch_dependent_clusters(kKernel, dim3(cluster), cluster, kThreads, shared, state, p);
  check_launch("moe_router");
  return true;
}
template <int STEPS, bool MANY>
bool launch_for_experts(const Params& p, const CudaStream& state) {
  if (p.router.n <= 32) {
    return launch<STEPS, 8, 1, MANY>(p, state);
  }
  return p.router.n <= 64 ? launch<STEPS, 8, 2, MANY>(p, state) : launch<STEPS, 16, 4, MANY>(p, state);
}
template <int STEPS>
bool launch_for_rows(const Params& p, const CudaStream& state) {
  return p.num_rows <= kRowsAtOnce ? launch_for_experts<STEPS, false>(p, state)
                                   : launch_for_experts<STEPS, true>(p, state);
}

// Most experts for which one launch is faster also where the kernel ahead has its shrink inside (H200, six layers as
// one graph, 1 row: Qwen3-30B-A3B's 128 experts 445 us and by three launches 452, with an adapter 539 and 521;
// gpt-oss's 32 experts with an adapter 658 and 662).
constexpr int kExpertsBesideLora = 64;

// False where this kernel cannot: nothing was launched.
bool launch_one(const MoeRouterArgs& args, const CudaStream& state) {
  if (state.compute_capability < 90 || !fits(args)) {
    return false;
  }
  const Params p = params_of(args);
  if (p.k <= 2 * kStep) {
    return launch_for_rows<2>(p, state);
  }
  return p.k <= 3 * kStep ? launch_for_rows<3>(p, state) : launch_for_rows<4>(p, state);
}

}  // namespace

void moe_router_cuda_by(RouterPath path, const MoeRouterArgs& args, Stream& stream) {
  const bool fast = args.router.lora == nullptr || args.route.topk.num_experts <= kExpertsBesideLora;
  const bool wanted = path == RouterPath::kOne || (path == RouterPath::kAuto && fast);
  if (wanted && args.norm.num_rows > 0 && launch_one(args, cuda_state(stream))) {
    return;
  }
  rms_norm_cuda(args.norm, stream);
  linear_cuda(args.router, stream);
  moe_route_cuda(args.route, stream);
}

void moe_router_cuda(const MoeRouterArgs& args, Stream& stream) {
  moe_router_cuda_by(RouterPath::kAuto, args, stream);
}

}  // namespace moelora
