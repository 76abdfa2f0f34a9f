// SPDX-License-Identifier: Apache-2.0
// The table of plain loops. It is the oracle of the op tests and a complete backend: the engine runs on it unchanged,
// slowly. Ops without a faster variant stand in the table of kernels_cpu() too.
#include "kernels/kernels.h"

namespace moelora {

const Kernels& kernels_reference() {
  static constexpr Kernels kTable = {
      .name = "reference",
      .embedding = embedding_cpu,
      .rms_norm = rms_norm_cpu,
      .linear = linear_cpu,
      .swiglu = swiglu_cpu,
      .rope_kv_write = rope_kv_write_cpu,
      .paged_attention = paged_attention_cpu,
      .router_topk = router_topk_cpu,
      .moe_sort = moe_sort_cpu,
      .moe_route = moe_route_cpu,
      .moe_router = moe_router_cpu,
      .moe_gate_up = moe_gate_up_cpu,
      .moe_down = moe_down_cpu,
      .moe_combine = moe_combine_cpu,
      .sample_tokens = sample_tokens_cpu,
      .copy_pages = copy_pages_cpu,
      .write_pages = write_pages_cpu,
      .read_pages = read_pages_cpu,
      .fill_random = fill_random_cpu,
      .read_memory = read_memory_cpu,
      .lora_resolve = nullptr,
      .pack_mxfp4 = nullptr,
  };
  return kTable;
}

}  // namespace moelora
