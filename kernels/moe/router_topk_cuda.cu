// SPDX-License-Identifier: Apache-2.0
// router_topk on CUDA: one warp a row (kernels/moe/router_topk_row.cuh). Limited by latency.
#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/moe/router_topk.h"
#include "kernels/moe/router_topk_row.cuh"

namespace moelora {
namespace {

constexpr int WARPS = 4;  // rows a block

template <int PER_LANE>
__global__ void __launch_bounds__(WARPS * 32)
    router_kernel(const float* logits, int64_t stride, int num_rows, int num_experts, int top_k, bool renormalize,
                  int32_t* ids, float* weights) {
  __shared__ RouterChoice choices[WARPS][kMaxTopK];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * WARPS + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  let_next_start();
  wait_for_previous();
  if (row >= num_rows) {
    return;
  }
  RouterChoice* choice = choices[threadIdx.x / 32];
  choose_experts<PER_LANE>(logits + row * stride, num_experts, top_k, choice);
  const float weight = choice_weight<PER_LANE>(logits + row * stride, num_experts, top_k, renormalize, choice);
  if (lane < top_k) {
    ids[row * top_k + lane] = static_cast<int32_t>(choice[lane].expert);
    weights[row * top_k + lane] = weight;
  }
}

template <int PER_LANE>
void launch(const RouterTopkArgs& args, const CudaStream& state) {
  const auto blocks = static_cast<unsigned>((args.num_rows + WARPS - 1) / WARPS);
  launch_dependent(router_kernel<PER_LANE>, dim3(blocks), WARPS * 32, 0, state, args.logits.f32(), args.logits.stride,
                   args.num_rows, args.num_experts, args.top_k, args.renormalize, args.ids, args.weights);
}

}  // namespace

void router_topk_cuda(const RouterTopkArgs& args, Stream& stream) {
  MOELORA_ASSERT(args.top_k >= 1 && args.top_k <= args.num_experts && args.top_k <= kMaxTopK);
  MOELORA_ASSERT(args.num_experts <= 512 && args.score == RouterScore::kSoftmax);
  if (args.num_rows == 0) {
    return;
  }
  if (args.num_experts <= 32) {
    launch<1>(args, cuda_state(stream));
  } else if (args.num_experts <= 64) {
    launch<2>(args, cuda_state(stream));
  } else if (args.num_experts <= 128) {
    launch<4>(args, cuda_state(stream));
  } else if (args.num_experts <= 256) {
    launch<8>(args, cuda_state(stream));
  } else {
    launch<16>(args, cuda_state(stream));
  }
  check_launch("router_topk");
}

}  // namespace moelora
