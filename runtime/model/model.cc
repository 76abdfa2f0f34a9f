// SPDX-License-Identifier: Apache-2.0
#include "runtime/model/model.h"

namespace moelora {
namespace {

double record_bytes(const LoraRecord* record, int32_t k, int32_t n) {
  if (record == nullptr) {
    return 0;
  }
  const auto dtype = static_cast<Dtype>(record->dtype);
  return static_cast<double>(kGranuleBytes) *
         (matrix_granules(record->rank, k, dtype) + matrix_granules(record->rank, n, dtype));
}

// Bytes of the adapters' dense matrices, each adapter of the batch once.
double dense_lora_bytes(const LoraBatch& lora, const ModelConfig& config, int32_t layer) {
  const int32_t q = config.num_heads * config.head_dim;
  const int32_t kv = config.num_kv_heads * config.head_dim;
  const int32_t h = config.hidden_size;
  const int32_t i = config.intermediate_size;
  const int32_t s = config.shared_intermediate_size;
  const int32_t shapes[kNumDenseModules][2] = {{h, q}, {h, kv}, {h, kv}, {q, h}, {h, config.num_experts},
                                               {h, i}, {h, i},  {i, h},  {h, s}, {h, s},
                                               {s, h}, {h, 1}};
  double bytes = 0;
  for (int32_t segment = 0; segment < lora.num_segments; ++segment) {
    for (int32_t module = 0; module < kNumDenseModules; ++module) {
      bytes += record_bytes(lora.table.dense(lora.segment_slot[segment], layer, static_cast<LoraModule>(module)),
                            shapes[module][0], shapes[module][1]);
    }
  }
  return bytes;
}

}  // namespace

double expert_lora_bytes(const LoraBatch& lora, const ModelConfig& config, int32_t layer, int32_t slot,
                         int32_t expert) {
  const int32_t h = config.hidden_size;
  const int32_t i = config.moe_intermediate_size;
  return record_bytes(lora.table.expert(slot, layer, expert, ExpertModule::kGate), h, i) +
         record_bytes(lora.table.expert(slot, layer, expert, ExpertModule::kUp), h, i) +
         record_bytes(lora.table.expert(slot, layer, expert, ExpertModule::kDown), i, h);
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

void Model::forward(const ForwardInput& input, Workspace& workspace, Stream& stream, ForwardCounts* counts) const {
  EmbeddingArgs embedding;
  embedding.table = weights_.embedding;
  embedding.token_ids = input.token_ids;
  embedding.num_rows = input.num_rows;
  embedding.out = workspace.hidden;
  kernels_.embedding(embedding, stream);

  for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
    attention_block(input, layer, workspace, stream);
    feed_forward_block(input, layer, workspace, stream, counts);
    if (counts != nullptr && input.lora != nullptr) {
      counts->lora_bytes += dense_lora_bytes(*input.lora, config_, layer);
    }
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
