// SPDX-License-Identifier: Apache-2.0
// Which tensors a family has. Read beside LayerWeights: the order here is the order of use in a layer.
#include "runtime/model/tensor_plan.h"

namespace moelora {
namespace {

std::string layer_prefix(int32_t layer) {
  return "model.layers." + std::to_string(layer) + ".";
}

class Planner {
 public:
  Planner(const ModelConfig& config, std::vector<PlannedTensor>& plan) : config_(config), plan_(plan) {}

  void layer(int32_t index, LayerWeights& layer) {
    prefix_ = layer_prefix(index);
    norm("input_layernorm", config_.hidden_size, layer.input_norm);
    attention(layer);
    norm("post_attention_layernorm", config_.hidden_size, layer.post_norm);
    if (config_.layer_is_moe[static_cast<size_t>(index)] != 0) {
      moe(layer);
    } else {
      mlp("mlp.", config_.intermediate_size, config_.mlp_bias, layer);
    }
  }

 private:
  void matrix(const std::string& name, int32_t rows, int32_t cols, Weight& weight,
              TensorKind kind = TensorKind::kMatrix) {
    plan_.push_back({{prefix_ + name + ".weight"}, kind, rows, cols, &weight});
  }
  void norm(const std::string& name, int32_t cols, Weight& weight) {
    plan_.push_back({{prefix_ + name + ".weight"}, TensorKind::kNorm, 1, cols, &weight});
  }
  void bias(bool present, const std::string& name, int32_t cols, Weight& weight) {
    if (present) {
      plan_.push_back({{prefix_ + name + ".bias"}, TensorKind::kBias, 1, cols, &weight});
    }
  }

  void attention(LayerWeights& layer) {
    const int32_t width = config_.hidden_size;
    const int32_t q_rows = config_.num_heads * config_.head_dim;
    const int32_t kv_rows = config_.num_kv_heads * config_.head_dim;
    matrix("self_attn.q_proj", q_rows, width, layer.q);
    matrix("self_attn.k_proj", kv_rows, width, layer.k);
    matrix("self_attn.v_proj", kv_rows, width, layer.v);
    matrix("self_attn.o_proj", width, q_rows, layer.o);
    if (config_.family == Family::kGptOss) {
      plan_.push_back({{prefix_ + "self_attn.sinks"}, TensorKind::kSinks, 1, config_.num_heads, &layer.stored_sinks});
    }
    bias(config_.qkv_bias, "self_attn.q_proj", q_rows, layer.q_bias);
    bias(config_.qkv_bias, "self_attn.k_proj", kv_rows, layer.k_bias);
    bias(config_.qkv_bias, "self_attn.v_proj", kv_rows, layer.v_bias);
    bias(config_.o_bias, "self_attn.o_proj", width, layer.o_bias);
    if (config_.qk_norm == QkNorm::kNone) {
      return;
    }
    const bool full = config_.qk_norm == QkNorm::kFull;
    norm("self_attn.q_norm", full ? q_rows : config_.head_dim, layer.q_norm);
    norm("self_attn.k_norm", full ? kv_rows : config_.head_dim, layer.k_norm);
  }

  void mlp(const std::string& module, int32_t inner, bool biased, LayerWeights& layer) {
    const int32_t width = config_.hidden_size;
    matrix(module + "gate_proj", inner, width, layer.gate);
    matrix(module + "up_proj", inner, width, layer.up);
    matrix(module + "down_proj", width, inner, layer.down);
    bias(biased, module + "gate_proj", inner, layer.gate_bias);
    bias(biased, module + "up_proj", inner, layer.up_bias);
    bias(biased, module + "down_proj", width, layer.down_bias);
  }

  void gpt_oss_moe(LayerWeights& layer) {
    const int32_t experts = config_.num_experts;
    matrix("mlp.router", experts, config_.hidden_size, layer.router, TensorKind::kRouter);
    bias(true, "mlp.router", experts, layer.router_bias);
    plan_.push_back({{prefix_ + "mlp.experts.gate_up_proj_bias"},
                     TensorKind::kExpertBias,
                     experts,
                     2 * config_.moe_intermediate_size,
                     &layer.stored_gate_up_bias});
    plan_.push_back({{prefix_ + "mlp.experts.down_proj_bias"},
                     TensorKind::kExpertBias,
                     experts,
                     config_.hidden_size,
                     &layer.stored_down_bias});
  }

  void moe(LayerWeights& layer) {
    if (config_.family == Family::kGptOss) {
      return gpt_oss_moe(layer);
    }
    const int32_t width = config_.hidden_size;
    matrix("mlp.gate", config_.num_experts, width, layer.router, TensorKind::kRouter);
    if (config_.family == Family::kMixtral) {
      plan_.back().names.insert(plan_.back().names.begin(), prefix_ + "block_sparse_moe.gate.weight");
    }
    if (config_.shared_intermediate_size == 0) {
      return;
    }
    const int32_t inner = config_.shared_intermediate_size;
    matrix("mlp.shared_expert.gate_proj", inner, width, layer.shared_gate);
    matrix("mlp.shared_expert.up_proj", inner, width, layer.shared_up);
    matrix("mlp.shared_expert.down_proj", width, inner, layer.shared_down);
    matrix("mlp.shared_expert_gate", 1, width, layer.shared_expert_gate);
  }

  const ModelConfig& config_;
  std::vector<PlannedTensor>& plan_;
  std::string prefix_;
};

}  // namespace

std::vector<PlannedTensor> plan_tensors(const ModelConfig& config, Weights& weights) {
  std::vector<PlannedTensor> plan;
  plan.push_back(
      {{"model.embed_tokens.weight"}, TensorKind::kMatrix, config.vocab_size, config.hidden_size, &weights.embedding});
  Planner planner(config, plan);
  for (int32_t i = 0; i < config.num_layers; ++i) {
    planner.layer(i, weights.layers[static_cast<size_t>(i)]);
  }
  plan.push_back({{"model.norm.weight"}, TensorKind::kNorm, 1, config.hidden_size, &weights.final_norm});
  if (!config.tie_embeddings) {
    plan.push_back({{"lm_head.weight"}, TensorKind::kMatrix, config.vocab_size, config.hidden_size, &weights.lm_head});
  }
  return plan;
}

std::vector<PlannedExperts> plan_experts(const ModelConfig& config, LayerWeights& layer) {
  const bool mixtral = config.family == Family::kMixtral;
  const int32_t inner = config.moe_intermediate_size;
  const int32_t width = config.hidden_size;
  return {{mixtral ? "w1" : "gate_proj", inner, width, &layer.expert_gate_data, &layer.expert_gate_scales,
           &layer.expert_gate},
          {mixtral ? "w3" : "up_proj", inner, width, &layer.expert_up_data, &layer.expert_up_scales, &layer.expert_up},
          {mixtral ? "w2" : "down_proj", width, inner, &layer.expert_down_data, &layer.expert_down_scales,
           &layer.expert_down}};
}

std::string expert_tensor_name(const ModelConfig& config, int32_t layer, int32_t expert, const char* projection) {
  const char* module = config.family == Family::kMixtral ? "block_sparse_moe.experts." : "mlp.experts.";
  return layer_prefix(layer) + module + std::to_string(expert) + "." + projection + ".weight";
}

std::string fused_gate_up_name(int32_t layer) {
  return layer_prefix(layer) + "mlp.experts.gate_up_proj";
}
std::string fused_down_name(int32_t layer) {
  return layer_prefix(layer) + "mlp.experts.down_proj";
}

}  // namespace moelora
