// SPDX-License-Identifier: Apache-2.0
// moe_route on CUDA. Few rows (decode): one block, one launch, kernels/moe/moe_route_few.cuh. Limited by latency: the
// logits, the rounds of the top-k, two barriers. More rows: router_topk and moe_sort.
#include <algorithm>
#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/moe/moe_route.h"
#include "kernels/moe/moe_route_few.cuh"

namespace moelora {
namespace {

constexpr int MAX_WARPS = 32;

// As many warps as there are rows, up to 32, and more than there are groups of 32 experts, of which PER_LANE are
// enough.
template <int PER_LANE>
__global__ void __launch_bounds__(MAX_WARPS * 32, 1) route_kernel(const __grid_constant__ MoeRouteArgs args) {
  __shared__ route::Shared<route::kMaxRows, route::kMaxPairs, route::kMaxExperts> s;
  let_next_start();
  route::clear_sets(args.topk.num_experts, s);
  __syncthreads();  // sets are empty
  const route::Slots slots(args);
  wait_for_previous();
  const route::Logits logits{static_cast<const float*>(args.topk.logits.data), args.topk.logits.stride};
  if (args.topk.num_rows > 1) {
    route::route_rows<PER_LANE>(args, logits, slots, s);
  } else if (threadIdx.x < 32) {
    route::route_one_row<PER_LANE>(args, logits, slots, s.choice);
  }
}

template <int PER_LANE>
void launch(const MoeRouteArgs& args, const CudaStream& state) {
  const int wanted = std::max(args.topk.num_rows, (args.topk.num_experts + 31) / 32 + 1);
  const auto threads = static_cast<unsigned>(32 * std::min(wanted, MAX_WARPS));
  launch_dependent(route_kernel<PER_LANE>, dim3(1), threads, 0, state, args);
}

}  // namespace

void moe_route_cuda(const MoeRouteArgs& args, Stream& stream) {
  const RouterTopkArgs& topk = args.topk;
  if (topk.num_rows > route::kMaxRows || int64_t{topk.num_rows} * topk.top_k > route::kMaxPairs ||
      topk.num_experts > route::kMaxExperts) {
    router_topk_cuda(topk, stream);
    return moe_sort_cuda(route_sort(args), stream);
  }
  MOELORA_ASSERT(topk.top_k >= 1 && topk.top_k <= topk.num_experts && topk.top_k <= kMaxTopK);
  MOELORA_ASSERT(topk.score == RouterScore::kSoftmax && topk.logits.dtype == Dtype::kF32);
  MOELORA_ASSERT(args.order.active_experts != nullptr && args.order.num_active != nullptr);
  if (topk.num_rows == 0) {
    return;
  }
  if (topk.num_experts <= 32) {
    launch<1>(args, cuda_state(stream));
  } else if (topk.num_experts <= 64) {
    launch<2>(args, cuda_state(stream));
  } else if (topk.num_experts <= 128) {
    launch<4>(args, cuda_state(stream));
  } else {
    launch<8>(args, cuda_state(stream));
  }
  check_launch("moe_route");
}

}  // namespace moelora
