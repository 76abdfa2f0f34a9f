// SPDX-License-Identifier: Apache-2.0
#include "runtime/model/model.h"

namespace moelora {

LoraModule Model::adapted(const ForwardInput& input, LoraModule module) {
  return input.lora != nullptr && input.lora->adapts(module) ? module : LoraModule::kNone;
}

LoraAhead Model::ahead(const ForwardInput& input, int32_t layer, std::initializer_list<LoraModule> modules, int32_t k) {
  LoraAhead ahead;
  ahead.layer = layer;
  ahead.k = k;
  size_t i = 0;
  for (const LoraModule module : modules) {
    ahead.modules[i] = adapted(input, module);
    ahead.lora = ahead.modules[i++] != LoraModule::kNone ? input.lora : ahead.lora;
  }
  return ahead;
}

LinearArgs Model::linear_args(const ForwardInput& input, int32_t layer, const Rows& x, int32_t k,
                              Workspace& workspace) const {
  LinearArgs args;
  args.x = x;
  args.num_rows = input.num_rows;
  args.k = k;
  args.layer = layer;
  args.lora = input.lora;
  args.compute = compute_;
  args.scratch = workspace.scratch;
  args.scratch_bytes = workspace.scratch_bytes;
  return args;
}

void Model::forward(const ForwardInput& input, Workspace& workspace, Stream& stream) const {
  EmbeddingArgs embedding;
  embedding.table = weights_.embedding;
  embedding.token_ids = input.token_ids;
  embedding.num_rows = input.num_rows;
  embedding.out = workspace.hidden;
  kernels_.embedding(embedding, stream);

  for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
    const ProfileRange range(stream, "layer", layer);
    attention_block(input, layer, workspace, stream);
    feed_forward_block(input, layer, workspace, stream);
  }
  if (input.num_logit_rows == 0) {
    return;
  }

  RmsNormArgs norm;
  norm.x = workspace.hidden;
  norm.row_index = input.logit_rows;  // the head runs on the wanted rows only
  norm.weight = weights_.final_norm;
  norm.eps = config_.rms_norm_eps;
  norm.num_rows = input.num_logit_rows;
  norm.width = config_.hidden_size;
  norm.out = workspace.logits_in;
  kernels_.rms_norm(norm, stream);

  LinearArgs head = linear_args(input, 0, workspace.logits_in, config_.hidden_size, workspace);
  head.num_rows = input.num_logit_rows;
  head.lora = nullptr;
  head.num_parts = 1;
  head.parts[0].weight = weights_.lm_head;
  head.parts[0].out = workspace.logits;
  kernels_.linear(head, stream);
}

}  // namespace moelora
