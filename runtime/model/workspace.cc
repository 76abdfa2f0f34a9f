// SPDX-License-Identifier: Apache-2.0
#include "runtime/model/workspace.h"

#include <algorithm>

#include "kernels/attention/paged_attention.h"
#include "kernels/base/error.h"
#include "kernels/dense/linear.h"
#include "kernels/moe/expert_path.h"

namespace moelora {

// Runs twice: once to count bytes, once to hand out addresses, so that both always agree.
template <class Take>
void Workspace::lay_out(const ModelConfig& config, const WorkspaceLimits& limits, Dtype activation, const Take& take) {
  const auto rows = static_cast<size_t>(limits.num_rows_max);
  const auto logit_rows = static_cast<size_t>(limits.num_logit_rows_max);
  const auto hidden_size = static_cast<size_t>(config.hidden_size);
  const auto q_width = static_cast<size_t>(config.num_heads) * static_cast<size_t>(config.head_dim);
  const auto kv_width = static_cast<size_t>(config.num_kv_heads) * static_cast<size_t>(config.head_dim);
  const auto matrix = [&](size_t count, size_t width, Dtype dtype = Dtype::kF32) {
    return Rows{take(count * width * dtype_bytes(dtype)), dtype, static_cast<int64_t>(width)};
  };
  const auto ints = [&](size_t count) { return reinterpret_cast<int32_t*>(take(count * sizeof(int32_t))); };
  hidden = matrix(rows, hidden_size);
  normed = matrix(rows, hidden_size, activation);
  q = matrix(rows, q_width);
  k = matrix(rows, kv_width);
  v = matrix(rows, kv_width);
  attention = matrix(rows, q_width, activation);
  const size_t mlp_width =
      static_cast<size_t>(std::max({config.intermediate_size, config.shared_intermediate_size, 1}));
  gate = matrix(rows, mlp_width);
  up = matrix(rows, mlp_width);
  mlp_act = activation == Dtype::kF32 ? gate : matrix(rows, mlp_width, activation);
  const auto rank = static_cast<size_t>(limits.lora_rank_max);
  scratch_bytes = linear_scratch_bytes(rows, std::max({hidden_size, q_width, mlp_width}), rows, rank);
  if (config.num_experts > 0) {
    const auto experts = static_cast<size_t>(config.num_experts);
    const size_t pairs = rows * static_cast<size_t>(config.top_k);
    const auto expert_width = static_cast<size_t>(config.moe_intermediate_size);
    router_logits = matrix(rows, experts);
    expert_ids = ints(pairs);
    expert_weights = reinterpret_cast<float*>(take(pairs * sizeof(float)));
    order.pair_row = ints(pairs);
    order.pair_position = ints(pairs);
    order.expert_begin = ints(experts + 1);
    order.segment_begin = ints(pairs + 1);
    order.segment_expert = ints(pairs);
    order.segment_slot = ints(pairs);
    order.num_segments = ints(1);
    order.active_experts = ints(experts);
    order.num_active = ints(1);
    expert_act = matrix(pairs, expert_width, activation);
    expert_out = matrix(pairs, hidden_size, activation);
    if (config.shared_intermediate_size > 0) {
      shared = matrix(rows, hidden_size);
      shared_gate = matrix(rows, 1);
    }
    const size_t few = std::min(pairs, few_token_pairs(experts));
    scratch_bytes =
        std::max({scratch_bytes, linear_scratch_bytes(pairs, expert_width, pairs, rank),
                  linear_scratch_bytes(rows, hidden_size, pairs, rank),
                  expert_scratch_bytes(few, 2, rank, expert_width), expert_scratch_bytes(few, 1, rank, hidden_size)});
    if (activation == Dtype::kBf16 && pairs > few) {  // beside shrunk values
      scratch_bytes = std::max({scratch_bytes, pairs * 2 * rank * 4 + expert_token_bytes(pairs, experts, hidden_size),
                                pairs * rank * 4 + expert_token_bytes(pairs, experts, expert_width)});
    }
  }
  scratch_bytes =
      std::max(scratch_bytes, paged_attention_scratch_bytes(logit_rows, static_cast<size_t>(config.num_heads),
                                                            static_cast<size_t>(config.head_dim)));
  logits_in = matrix(logit_rows, hidden_size, activation);
  logits = matrix(logit_rows, static_cast<size_t>(config.vocab_size));
  scratch = take(scratch_bytes);
}

size_t Workspace::bytes_needed(const ModelConfig& config, const WorkspaceLimits& limits, Dtype activation) {
  size_t bytes = 0;
  Workspace().lay_out(config, limits, activation, [&](size_t more) -> std::byte* {
    bytes += (more + 255) / 256 * 256;
    return nullptr;
  });
  return bytes;
}

Workspace::Workspace(const ModelConfig& config, const WorkspaceLimits& limits, Device& device)
    : memory_(device, bytes_needed(config, limits, device.activation_dtype()),
              "workspace (max_batch_tokens, max_num_sequences)"),
      totals_(std::make_unique<MirrorMemory>(device, 2 * sizeof(uint32_t), "counters of the experts")) {
  size_t used = 0;
  lay_out(config, limits, device.activation_dtype(), [&](size_t bytes) -> std::byte* {
    std::byte* at = memory_.data() + used;
    used += (bytes + 255) / 256 * 256;
    return at;
  });
  MOELORA_ASSERT(used == memory_.bytes());
  order.totals = reinterpret_cast<uint32_t*>(totals_->device());
}

}  // namespace moelora
