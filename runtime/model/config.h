// SPDX-License-Identifier: Apache-2.0
// The numbers of an architecture, read from config.json (both the older and the v5 spelling) and checked once,
// here. What the runtime does not implement is refused by name. Families: GptOssForCausalLM, Qwen3MoeForCausalLM,
// Qwen2MoeForCausalLM, MixtralForCausalLM, OlmoeForCausalLM, LlamaForCausalLM, Qwen3ForCausalLM.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/base/dtype.h"

namespace moelora {

enum class Family : uint8_t { kLlama, kQwen3, kQwen3Moe, kQwen2Moe, kMixtral, kOlmoe, kGptOss };
enum class QkNorm : uint8_t { kNone, kPerHead, kFull };

struct ModelConfig {
  std::string architecture;  // architectures[0]
  Family family = Family::kLlama;
  Dtype dtype = Dtype::kBf16;  // of random weights; stored tensors carry their own
  int32_t hidden_size = 0;
  int32_t num_layers = 0;
  int32_t num_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t vocab_size = 0;
  int32_t intermediate_size = 0;  // dense MLP layers; 0 = there are none
  int32_t num_experts = 0;        // 0 = dense model (no layer is MoE)
  int32_t top_k = 0;
  int32_t moe_intermediate_size = 0;
  int32_t shared_intermediate_size = 0;  // Qwen2-MoE; 0 = no shared expert
  bool norm_topk_prob = false;
  float swiglu_limit = 0.0f;   // gpt-oss: the clamp of its SwiGLU; 0 = the plain one
  bool mxfp4_experts = false;  // quantization_config says that routed experts are stored as MXFP4
  float rms_norm_eps = 1e-6f;
  int32_t max_position = 0;
  std::vector<int32_t> layer_window;  // [num_layers] positions that a row sees, itself included; 0 = all
  bool tie_embeddings = false;
  bool qkv_bias = false;
  bool o_bias = false;
  bool mlp_bias = false;
  QkNorm qk_norm = QkNorm::kNone;
  float clip_qkv = 0.0f;  // 0 = none
  double rope_theta = 10000.0;
  std::string rope_type = "default";
  std::vector<float> inv_freq;        // [head_dim / 2], scaling applied
  float rope_scale = 1.0f;            // on cos and sin (YaRN)
  std::vector<uint8_t> layer_is_moe;  // [num_layers]
  int32_t bos_token_id = -1;
  std::vector<int32_t> eos_token_ids;  // union of config.json and generation_config.json
  // Sampling defaults of generation_config.json; used only on request. -1 = absent.
  // `do_sample` false gives temperature 0.
  float default_temperature = -1.0f;
  float default_top_p = -1.0f;
  int32_t default_top_k = -1;
  float default_repetition_penalty = -1.0f;

  bool operator==(const ModelConfig&) const = default;
};

// Reads DIR/config.json and, if present, DIR/generation_config.json. Throws Error naming file and key:
// kIo (cannot read), kCorrupt (not JSON, wrong type, missing key), kUnsupported (architecture, rope type, ...).
ModelConfig load_model_config(const std::string& dir);
// The same from text; `file` is used in messages. `generation_json` may be empty.
ModelConfig parse_model_config(const std::string& config_json, const std::string& generation_json,
                               const std::string& file);

}  // namespace moelora
