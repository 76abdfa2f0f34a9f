// SPDX-License-Identifier: Apache-2.0
// moe_gate_up on CUDA: two launches. The shrink of the adapters' rows (kernels/lora/lora_shrink_cuda.h), then one
// kernel that gathers the tokens, multiplies them with gate and up, adds the expanded LoRA, its bias and the experts'
// bias, and applies the activation before anything is stored: neither gate nor up ever reaches memory. At most 8 rows:
// kernels/moe/expert_few.cuh. Few tokens an expert: expert_decode.cuh or, from some tokens an expert on and for MXFP4,
// expert_stream.cuh, limited by reading the weights. Many: expert_prefill_sm90.cuh, where scratch allows it with a
// sorted copy of x (expert_tokens.cuh), or, before sm_90, expert_prefill.cuh, limited by the tensor cores.
// With few tokens one launch before it computes the deltas (kernels/moe/expert_delta.cuh or, of many pairs,
// expert_delta_stream.cuh; of one row of MXFP4 the product does); where there are no clusters, shrink and expand
// (kernels/moe/expert_expand.cuh) are two.
// H200, random weights, between two events (1.3 us of them in every figure), read ceiling 4.5 TB/s; 1 row by
// expert_decode.cuh (what expert_few.cuh gives is said there):
//   gpt-oss-20b (MXFP4)    1 row 20.5 us for 35 MB, with 1 adapter 23.9 us; 64 rows, 21 experts 96 us for 189 MB, with
//                          8 adapters of rank 32 131 us; 4096 rows 1,106 us = 491 TFLOP/s, with an adapter for each
//                          of three prompts 1,221 us
//   Qwen3-30B-A3B (bf16)   1 row 19.4 us for 50 MB; 64 rows, in a graph, 193 us for 797 MB = 91 % of the ceiling, with
//                          8 adapters 246 us; 4096 rows (about 256 tokens an expert), tokens gathered, 532 us
#include "kernels/moe/moe_gate_up.h"

#include "kernels/moe/expert_launch.cuh"

namespace moelora {

void moe_gate_up_cuda_by(ExpertPath path, const MoeGateUpArgs& args, Stream& stream) {
  const bool tiles = args.gate.format == ExpertFormat::kMxfp4Tiles;
  MOELORA_ASSERT(tiles || (args.up.rows == args.gate.rows && args.up.cols == args.gate.cols));
  if (args.num_rows == 0) {
    return;
  }
  ExpertGemm p;
  const ExpertShrinkArgs shrink =
      begin_expert_gemm(p, args, args.x, false, args.act, args.gate, tiles ? args.gate : args.up);
  p.high_bias = args.up.bias;
  p.row_tiles = (args.gate.rows + 7) / 8;
  p.activation = args.activation;
  p.limit = args.limit;
  launch_expert_format<true>(p, shrink, args.gate.format, path, args.num_rows, args.top_k, args.num_experts, stream);
  check_launch("moe_gate_up");
}

void moe_gate_up_cuda(const MoeGateUpArgs& args, Stream& stream) {
  moe_gate_up_cuda_by(ExpertPath::kAuto, args, stream);
}

}  // namespace moelora
