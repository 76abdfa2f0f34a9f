// SPDX-License-Identifier: Apache-2.0
// The second half of the experts' deltas for few tokens, where kernels/moe/expert_delta.cuh does not compute them
// whole: all of them at once, before the stream of weights reaches its epilogue, which adds them. A block takes 256
// outputs of one pair and module, a thread an output: look-ups of thousands of (pair, output) run side by side instead
// of one after the other in a warp beside the stream (gpt-oss, 64 rows, 8 adapters on an H200: such a warp made gate_up
// take 347 us instead of 120). Limited by the latency of row, slot, record and B for few pairs, by reading B for many.
// Fixed order of sums; a pair's delta depends on it alone.
#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/moe/expert_gemm.cuh"

namespace moelora {

constexpr int kExpandThreads = 256;

template <bool GATE_UP>
__global__ void __launch_bounds__(kExpandThreads)
    expert_expand_kernel(const __grid_constant__ ExpertGemm p, int num_experts) {
  constexpr int kModules = GATE_UP ? 2 : 1;
  __shared__ LoraToken token;
  __shared__ int expert;
  wait_for_previous();
  let_next_start();
  const int pair = static_cast<int>(blockIdx.y) / kModules;
  const int module = static_cast<int>(blockIdx.y) % kModules;
  for (int e = static_cast<int>(threadIdx.x); e < num_experts; e += kExpandThreads) {
    if (p.order.expert_begin[e] <= pair && pair < p.order.expert_begin[e + 1]) {
      expert = e;
    }
  }
  const int row = p.order.pair_row[pair];
  const int slot = p.lora.row_slot[row];
  const float scale = p.lora.row_scale[row];
  __syncthreads();  // expert is there
  if (threadIdx.x == 0) {
    const ExpertModule which = !GATE_UP ? ExpertModule::kDown : module == 0 ? ExpertModule::kGate : ExpertModule::kUp;
    token =
        lora_token(slot != 0 ? p.lora.table.resolved_expert(slot, p.lora.layer, expert, which) : nullptr, slot, scale);
    if (blockIdx.x == 0) {
      p.lora.adapted[blockIdx.y] = token.rank;
    }
  }
  __syncthreads();  // token is there
  const int n = static_cast<int>(blockIdx.x) * kExpandThreads + static_cast<int>(threadIdx.x);
  if (token.rank != 0 && n < p.rows) {
    const float* shrunk = p.lora.shrunk + static_cast<int64_t>(blockIdx.y) * p.lora.rank_stride;
    p.lora.delta[static_cast<int64_t>(blockIdx.y) * p.rows + n] = lora_delta(p.lora.table, token, n, shrunk);
  }
}

template <bool GATE_UP>
void launch_expert_expand(const ExpertGemm& p, int64_t num_pairs, int num_experts, const CudaStream& state) {
  const dim3 grid(static_cast<unsigned>((p.rows + kExpandThreads - 1) / kExpandThreads),
                  static_cast<unsigned>(num_pairs * (GATE_UP ? 2 : 1)));
  launch_dependent(expert_expand_kernel<GATE_UP>, grid, kExpandThreads, 0, state, p, num_experts);
}

}  // namespace moelora
