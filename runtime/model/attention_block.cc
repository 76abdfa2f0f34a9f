// SPDX-License-Identifier: Apache-2.0
// h += W_o attention(rope(W_q n), rope(W_k n), W_v n), n = norm(h), each linear with its adapter's delta.
#include <cmath>

#include "runtime/model/model.h"

namespace moelora {

void Model::attend(const ForwardInput& input, int32_t layer, const RopeKvWriteArgs* rope, Workspace& workspace,
                   Stream& stream) const {
  PagedAttentionArgs attention;
  attention.q = workspace.q;
  attention.out = workspace.attention;
  attention.num_sequences = input.num_sequences;
  attention.num_heads = config_.num_heads;
  attention.row_begin = input.row_begin;
  attention.positions = input.positions;
  attention.scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim));
  attention.window = config_.layer_window[static_cast<size_t>(layer)];
  attention.sinks = weights_.layers[static_cast<size_t>(layer)].sinks;
  attention.kv = input.kv;
  attention.layer = layer;
  attention.rope = rope;
  attention.num_rows = input.num_rows;
  attention.scratch = workspace.scratch;
  attention.scratch_bytes = workspace.scratch_bytes;
  kernels_.paged_attention(attention, stream);
}

LoraAhead Model::attention_ahead(const ForwardInput& input, int32_t layer) const {
  return layer < config_.num_layers
             ? ahead(input, layer, {LoraModule::kQ, LoraModule::kK, LoraModule::kV}, config_.hidden_size)
             : LoraAhead();
}

void Model::attention_block(const ForwardInput& input, int32_t layer, Workspace& workspace, Stream& stream) const {
  const LayerWeights& weights = weights_.layers[static_cast<size_t>(layer)];
  const int32_t q_width = config_.num_heads * config_.head_dim;
  const int32_t kv_width = config_.num_kv_heads * config_.head_dim;

  RmsNormArgs norm;
  norm.x = workspace.hidden;
  norm.weight = weights.input_norm;
  norm.eps = config_.rms_norm_eps;
  norm.num_rows = input.num_rows;
  norm.width = config_.hidden_size;
  norm.out = workspace.normed;
  if (layer == 0 || config_.layer_is_moe[static_cast<size_t>(layer) - 1] == 0) {  // else moe_combine did it
    kernels_.rms_norm(norm, stream);
  }

  LinearArgs qkv = linear_args(input, layer, workspace.normed, config_.hidden_size, workspace);
  qkv.num_parts = 3;
  qkv.parts[0] = {weights.q, weights.q_bias, workspace.q, adapted(input, LoraModule::kQ)};
  qkv.parts[1] = {weights.k, weights.k_bias, workspace.k, adapted(input, LoraModule::kK)};
  qkv.parts[2] = {weights.v, weights.v_bias, workspace.v, adapted(input, LoraModule::kV)};
  qkv.ahead = ahead(input, layer, {LoraModule::kO}, q_width);
  kernels_.linear(qkv, stream);

  if (config_.qk_norm == QkNorm::kFull) {  // OLMoE: over the whole projected vector, before heads exist
    norm.x = norm.out = workspace.q;
    norm.weight = weights.q_norm;
    norm.width = q_width;
    kernels_.rms_norm(norm, stream);
    norm.x = norm.out = workspace.k;
    norm.weight = weights.k_norm;
    norm.width = kv_width;
    kernels_.rms_norm(norm, stream);
  }

  RopeKvWriteArgs rope;
  rope.q = workspace.q;
  rope.k = workspace.k;
  rope.v = workspace.v;
  rope.num_rows = input.num_rows;
  rope.num_heads = config_.num_heads;
  rope.clip = config_.clip_qkv;
  if (config_.qk_norm == QkNorm::kPerHead) {
    rope.q_norm = weights.q_norm;
    rope.k_norm = weights.k_norm;
  }
  rope.eps = config_.rms_norm_eps;
  rope.inv_freq = weights_.inv_freq != nullptr ? weights_.inv_freq : config_.inv_freq.data();
  rope.rope_scale = config_.rope_scale;
  rope.positions = input.positions;
  rope.row_sequence = input.row_sequence;
  rope.kv = input.kv;
  rope.layer = layer;
  // Rows of a prompt attend to each other: their K and V have to be there before.
  const bool apart = input.num_rows > input.num_sequences;
  if (apart) {
    kernels_.rope_kv_write(rope, stream);
  }
  attend(input, layer, apart ? nullptr : &rope, workspace, stream);

  LinearArgs o = linear_args(input, layer, workspace.attention, q_width, workspace);
  o.num_parts = 1;
  o.parts[0] = {weights.o, weights.o_bias, workspace.hidden, adapted(input, LoraModule::kO)};
  o.accumulate = true;
  kernels_.linear(o, stream);
}

}  // namespace moelora
