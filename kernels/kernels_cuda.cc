// SPDX-License-Identifier: Apache-2.0
// The table of the CUDA backend. Needs no toolkit header: an op's launcher has the signature of the op.
#include "kernels/kernels.h"

namespace moelora {

const Kernels& kernels_cuda() {
  static constexpr Kernels kTable = {
      .name = "cuda",
      .embedding = embedding_cuda,
      .rms_norm = rms_norm_cuda,
      .linear = linear_cuda,
      .swiglu = swiglu_cuda,
      .rope_kv_write = rope_kv_write_cuda,
      .paged_attention = paged_attention_cuda,
      .router_topk = router_topk_cuda,
      .moe_sort = moe_sort_cuda,
      .moe_route = moe_route_cuda,
      .moe_router = moe_router_cuda,
      .moe_gate_up = moe_gate_up_cuda,
      .moe_down = moe_down_cuda,
      .moe_combine = moe_combine_cuda,
      .sample_tokens = sample_tokens_cuda,
      .copy_pages = copy_pages_cuda,
      .write_pages = write_pages_cuda,
      .read_pages = read_pages_cuda,
      .fill_random = fill_random_cuda,
      .read_memory = read_memory_cuda,
      .lora_resolve = lora_resolve_cuda,
      .pack_mxfp4 = pack_mxfp4_cuda,
      .max_pairs = kMaxSortedPairsCuda,
  };
  return kTable;
}

}  // namespace moelora
