// SPDX-License-Identifier: Apache-2.0
// moe_down on CUDA: two launches. The shrink of the adapters' pairs (kernels/lora/lora_shrink_cuda.h), then one kernel
// that multiplies the activations with down and adds the expanded LoRA, its bias and the experts' bias in its
// accumulators. At most 8 rows: kernels/moe/expert_few.cuh. Few tokens an expert: expert_decode.cuh or, from one
// token an expert on and for MXFP4, expert_stream.cuh, limited by reading the weights. Many: expert_prefill_sm90.cuh
// or, before sm_90, expert_prefill.cuh, limited by the tensor cores.
// With few tokens one launch before it computes the deltas (kernels/moe/expert_delta.cuh or, of many pairs,
// expert_delta_stream.cuh; of one row of MXFP4 the product does); where there are no clusters, shrink and expand
// (kernels/moe/expert_expand.cuh) are two.
// H200, as in moe_gate_up_cuda.cu:
//   gpt-oss-20b (MXFP4)    1 row 15.7 us for 18 MB; 64 rows 60 us for 95 MB, with 8 adapters 87 us; 4096 rows 612 us =
//                          444 TFLOP/s, with an adapter for each of three prompts 700 us
//   Qwen3-30B-A3B (bf16)   1 row 14.6 us for 25 MB; 64 rows, in a graph, 99 us for 398 MB = 89 % of the ceiling, with 8
//                          adapters 128 us; 4096 rows, tokens gathered, 315 us
#include "kernels/moe/moe_down.h"

#include "kernels/moe/expert_launch.cuh"

namespace moelora {

void moe_down_cuda_by(ExpertPath path, const MoeDownArgs& args, Stream& stream) {
  if (args.num_rows == 0) {
    return;
  }
  ExpertGemm p;
  const ExpertShrinkArgs shrink = begin_expert_gemm(p, args, args.act, true, args.out, args.down, args.down);
  p.row_tiles = (args.down.rows + 15) / 16;
  launch_expert_format<false>(p, shrink, args.down.format, path, args.num_rows, args.top_k, args.num_experts, stream);
  check_launch("moe_down");
}

void moe_down_cuda(const MoeDownArgs& args, Stream& stream) {
  moe_down_cuda_by(ExpertPath::kAuto, args, stream);
}

}  // namespace moelora
