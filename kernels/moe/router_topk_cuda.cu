// SPDX-License-Identifier: Apache-2.0
// router_topk on CUDA: one warp a row, the logits in registers (lane i holds experts i, i + 32, ...). Each of the K
// rounds finds the largest key of the warp and then the lowest expert that has it, by two warp-wide integer reductions;
// keys are the bits of the logits in the order of the floats, so -inf and NaN (which loses to everything) need no
// special case. Sums of exponentials run in an order fixed by E. Limited by latency.
#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/moe/router_topk.h"

namespace moelora {
namespace {

constexpr int WARPS = 4;  // rows a block
constexpr int MAX_TOP_K = 32;
constexpr unsigned ALL = 0xffffffffu;

// Unsigned integers in the order of the floats, above 0; -0 counts as 0, NaN as -inf.
__device__ __forceinline__ uint32_t ordered_key(float value) {
  const uint32_t bits = value != value ? 0xff800000u : __float_as_uint(value + 0.0f);
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(ALL, value, offset);
  }
  return value;
}

// PER_LANE * 32 experts at most.
template <int PER_LANE>
__global__ void __launch_bounds__(WARPS * 32)
    router_kernel(const float* logits, int64_t stride, int num_rows, int num_experts, int top_k, bool renormalize,
                  int32_t* ids, float* weights) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * WARPS + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  let_next_start();
  wait_for_previous();
  if (row >= num_rows) {
    return;
  }
  const float* from = logits + row * stride;
  float value[PER_LANE];
  uint32_t key[PER_LANE];  // 0: taken, or no expert
  bool nan = false;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int expert = lane + 32 * i;
    value[i] = expert < num_experts ? from[expert] : 0.0f;
    key[i] = expert < num_experts ? ordered_key(value[i]) : 0u;
    nan = nan || value[i] != value[i];
  }
  nan = __any_sync(ALL, nan);
  float largest = 0.0f;
  float chosen = 0.0f;  // lane j: logit of choice j
  int chosen_id = 0;
  for (int j = 0; j < top_k; ++j) {
    uint32_t best = key[0];
    int best_at = 0;
#pragma unroll
    for (int i = 1; i < PER_LANE; ++i) {
      if (key[i] > best) {  // an equal key of a higher expert does not replace it
        best = key[i];
        best_at = i;
      }
    }
    const uint32_t winner_key = __reduce_max_sync(ALL, best);
    const auto expert = static_cast<unsigned>(lane + 32 * best_at);
    const unsigned winner = __reduce_min_sync(ALL, best == winner_key ? expert : 0xffffffffu);
    float mine = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      if (static_cast<unsigned>(lane + 32 * i) == winner) {
        mine = value[i];
        key[i] = 0u;
      }
    }
    const float logit = __shfl_sync(ALL, mine, static_cast<int>(winner % 32));
    largest = j == 0 ? logit : largest;
    if (lane == j) {
      chosen = logit;
      chosen_id = static_cast<int>(winner);
    }
  }
  float exponential = lane < top_k ? expf(chosen - largest) : 0.0f;
  float part = exponential;
  if (!renormalize) {
    part = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      part += lane + 32 * i < num_experts ? expf(value[i] - largest) : 0.0f;
    }
  }
  const float total = warp_sum(part);
  if (lane < top_k) {
    ids[row * top_k + lane] = chosen_id;
    // A poisoned row must reach the sampler as NaN, whichever experts it lost.
    weights[row * top_k + lane] = nan ? __uint_as_float(0x7fc00000u) : exponential / total;
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
  MOELORA_ASSERT(args.top_k >= 1 && args.top_k <= args.num_experts && args.top_k <= MAX_TOP_K);
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
