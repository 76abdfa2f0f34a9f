// SPDX-License-Identifier: Apache-2.0
// h += FFN(norm(h)): a dense SwiGLU MLP, or router, sort by (expert, adapter), gate_up, down, combine, and the
// shared expert of Qwen2-MoE. Every linear takes its adapter's delta inside its op; combine leaves the next layer's
// normed input, too.
#include "runtime/model/model.h"
#include "runtime/model/router_gap.h"

namespace moelora {
namespace {

// The batch's adapters if one of them may have experts; else null.
const LoraBatch* expert_lora(const ForwardInput& input) {
  const LoraBatch* lora = input.lora;
  return lora != nullptr && (lora->adapts(ExpertModule::kGate) || lora->adapts(ExpertModule::kUp) ||
                             lora->adapts(ExpertModule::kDown))
             ? lora
             : nullptr;
}

}  // namespace

void Model::feed_forward_block(const ForwardInput& input, int32_t layer, Workspace& workspace, Stream& stream) const {
  RmsNormArgs norm;
  norm.x = workspace.hidden;
  norm.weight = weights_.layers[static_cast<size_t>(layer)].post_norm;
  norm.eps = config_.rms_norm_eps;
  norm.num_rows = input.num_rows;
  norm.width = config_.hidden_size;
  norm.out = workspace.normed;
  if (config_.layer_is_moe[static_cast<size_t>(layer)] != 0) {
    route(norm, input, layer, workspace, stream);
    moe_mlp(input, layer, workspace, stream);
  } else {
    kernels_.rms_norm(norm, stream);
    dense_mlp(input, layer, workspace, stream);
  }
}

void Model::dense_mlp(const ForwardInput& input, int32_t layer, Workspace& workspace, Stream& stream) const {
  const LayerWeights& weights = weights_.layers[static_cast<size_t>(layer)];
  LinearArgs gate_up = linear_args(input, layer, workspace.normed, config_.hidden_size, workspace);
  gate_up.num_parts = 2;
  gate_up.parts[0] = {weights.gate, weights.gate_bias, workspace.gate, adapted(input, LoraModule::kGate)};
  gate_up.parts[1] = {weights.up, weights.up_bias, workspace.up, adapted(input, LoraModule::kUp)};
  kernels_.linear(gate_up, stream);
  kernels_.swiglu({workspace.gate, workspace.up, input.num_rows, config_.intermediate_size, workspace.mlp_act}, stream);
  LinearArgs down = linear_args(input, layer, workspace.mlp_act, config_.intermediate_size, workspace);
  down.num_parts = 1;
  down.parts[0] = {weights.down, weights.down_bias, workspace.hidden, adapted(input, LoraModule::kDown)};
  down.accumulate = true;
  down.ahead = attention_ahead(input, layer + 1);
  kernels_.linear(down, stream);
}

void Model::shared_expert(const ForwardInput& input, int32_t layer, Workspace& workspace, Stream& stream) const {
  const LayerWeights& weights = weights_.layers[static_cast<size_t>(layer)];
  LinearArgs gate_up = linear_args(input, layer, workspace.normed, config_.hidden_size, workspace);
  gate_up.num_parts = 3;
  gate_up.parts[0] = {weights.shared_gate, {}, workspace.gate, adapted(input, LoraModule::kSharedGate)};
  gate_up.parts[1] = {weights.shared_up, {}, workspace.up, adapted(input, LoraModule::kSharedUp)};
  gate_up.parts[2] = {
      weights.shared_expert_gate, {}, workspace.shared_gate, adapted(input, LoraModule::kSharedExpertGate)};
  kernels_.linear(gate_up, stream);
  kernels_.swiglu({workspace.gate, workspace.up, input.num_rows, config_.shared_intermediate_size, workspace.mlp_act},
                  stream);
  LinearArgs down = linear_args(input, layer, workspace.mlp_act, config_.shared_intermediate_size, workspace);
  down.num_parts = 1;
  down.parts[0] = {weights.shared_down, {}, workspace.shared, adapted(input, LoraModule::kSharedDown)};
  kernels_.linear(down, stream);
}

void Model::route(const RmsNormArgs& norm, const ForwardInput& input, int32_t layer, Workspace& workspace,
                  Stream& stream) const {
  const LayerWeights& weights = weights_.layers[static_cast<size_t>(layer)];
  MoeRouterArgs args;
  args.norm = norm;
  LinearArgs& router = args.router;
  router = linear_args(input, layer, workspace.normed, config_.hidden_size, workspace);
  router.num_parts = 1;
  router.parts[0] = {weights.router, weights.router_bias, workspace.router_logits, adapted(input, LoraModule::kRouter)};
  router.compute = Compute::kExact;  // top-k sets must not depend on rounding (formats.md A1)
  args.route.topk = {workspace.router_logits, input.num_rows,         config_.num_experts,  config_.top_k,
                     RouterScore::kSoftmax,   config_.norm_topk_prob, workspace.expert_ids, workspace.expert_weights};
  const LoraBatch* lora = expert_lora(input);
  args.route.row_slot = lora != nullptr ? lora->row_slot : nullptr;
  args.route.order = workspace.order;
  kernels_.moe_router(args, stream);
  if (input.router_gaps != nullptr) {
    narrow_router_gaps(workspace.router_logits, workspace.expert_ids, input.num_rows, config_.num_experts,
                       config_.top_k, input.router_gaps);
  }
}

void Model::moe_mlp(const ForwardInput& input, int32_t layer, Workspace& workspace, Stream& stream) const {
  const LayerWeights& weights = weights_.layers[static_cast<size_t>(layer)];
  MoeGateUpArgs gate_up;
  gate_up.x = workspace.normed;
  gate_up.gate = weights.expert_gate;
  gate_up.up = weights.expert_up;
  gate_up.order = workspace.order;
  gate_up.num_rows = input.num_rows;
  gate_up.top_k = config_.top_k;
  gate_up.num_experts = config_.num_experts;
  gate_up.layer = layer;
  gate_up.lora = expert_lora(input);
  gate_up.compute = compute_;
  gate_up.activation = config_.swiglu_limit > 0.0f ? MoeActivation::kClampedSwiglu : MoeActivation::kSilu;
  gate_up.limit = config_.swiglu_limit;
  gate_up.act = workspace.expert_act;
  gate_up.scratch = workspace.scratch;
  gate_up.scratch_bytes = workspace.scratch_bytes;
  kernels_.moe_gate_up(gate_up, stream);
  MoeDownArgs down;
  down.act = workspace.expert_act;
  down.down = weights.expert_down;
  down.order = workspace.order;
  down.num_rows = input.num_rows;
  down.top_k = config_.top_k;
  down.num_experts = config_.num_experts;
  down.layer = layer;
  down.lora = expert_lora(input);
  down.ahead = attention_ahead(input, layer + 1);
  down.compute = compute_;
  down.out = workspace.expert_out;
  down.scratch = workspace.scratch;
  down.scratch_bytes = workspace.scratch_bytes;
  kernels_.moe_down(down, stream);

  MoeCombineArgs combine;
  combine.down = workspace.expert_out;
  combine.weights = workspace.expert_weights;
  combine.order = workspace.order;
  combine.num_rows = input.num_rows;
  combine.top_k = config_.top_k;
  combine.width = config_.hidden_size;
  if (config_.shared_intermediate_size > 0) {
    shared_expert(input, layer, workspace, stream);
    combine.shared = workspace.shared;
    combine.shared_gate = workspace.shared_gate;
  }
  combine.hidden = workspace.hidden;
  if (layer + 1 < config_.num_layers) {
    combine.norm_weight = weights_.layers[static_cast<size_t>(layer) + 1].input_norm;
    combine.norm_eps = config_.rms_norm_eps;
    combine.normed = workspace.normed;
  }
  kernels_.moe_combine(combine, stream);
}

}  // namespace moelora
