// SPDX-License-Identifier: Apache-2.0
// config.json to numbers. A key whose absence would change the result is required unless every release of the
// family agrees on its default; a value that the runtime does not implement is refused by name. Sizes are bounded
// here, so that later products of them cannot overflow 32 bits per matrix dimension.
#include "runtime/model/config.h"

#include <algorithm>
#include <array>
#include <filesystem>

#include "runtime/model/config_source.h"

namespace moelora {
namespace {

struct FamilyName {
  const char* architecture;
  const char* model_type;
  Family family;
};
constexpr std::array<FamilyName, 7> kFamilies = {{
    {"GptOssForCausalLM", "gpt_oss", Family::kGptOss},
    {"Qwen3MoeForCausalLM", "qwen3_moe", Family::kQwen3Moe},
    {"Qwen2MoeForCausalLM", "qwen2_moe", Family::kQwen2Moe},
    {"MixtralForCausalLM", "mixtral", Family::kMixtral},
    {"OlmoeForCausalLM", "olmoe", Family::kOlmoe},
    {"LlamaForCausalLM", "llama", Family::kLlama},
    {"Qwen3ForCausalLM", "qwen3", Family::kQwen3},
}};

void parse_architecture(const ConfigSource& source, ModelConfig& config) {
  std::string wanted;
  bool by_type = false;
  const auto list = source.json.find("architectures");
  if (list != source.json.end() && list->is_array() && !list->empty()) {
    if (!list->front().is_string()) {
      source.corrupt("key 'architectures' must be a list of strings");
    }
    wanted = list->front().get<std::string>();
  } else if (source.has("architectures") && !list->is_array()) {
    source.corrupt("key 'architectures' must be a list of strings");
  } else {
    by_type = true;
    wanted = json_string_or(source.json, "model_type", "", source.file);
    if (wanted.empty()) {
      source.corrupt("keys 'architectures' and 'model_type' are missing");
    }
  }
  std::string supported;
  for (const FamilyName& name : kFamilies) {
    if (wanted == (by_type ? name.model_type : name.architecture)) {
      config.architecture = name.architecture;
      config.family = name.family;
      return;
    }
    supported += (supported.empty() ? "" : ", ") + std::string(by_type ? name.model_type : name.architecture);
  }
  source.unsupported(fmt::format("{} {} is not supported; supported: {}", by_type ? "model_type" : "architecture",
                                 printable(wanted), supported));
}

// Refuses what would silently give other numbers; notes the one method that is implemented.
void parse_quantization(const ConfigSource& source, ModelConfig& config) {
  for (const char* key : {"quantization_config", "compression_config"}) {
    if (!source.has(key)) {
      continue;
    }
    const Json& quantization = source.json.at(key);
    const std::string method =
        quantization.is_object() ? json_string_or(quantization, "quant_method", "unnamed", source.file) : "unnamed";
    if (config.family == Family::kGptOss && method == "mxfp4" && key == std::string("quantization_config")) {
      config.mxfp4_experts = true;
      continue;
    }
    source.unsupported(fmt::format("{}: quantisation method '{}' is not supported", key, printable(method)));
  }
}

void refuse_unimplemented(const ConfigSource& source) {
  for (const char* key : {"hidden_act", "hidden_activation"}) {
    const std::string activation = json_string_or(source.json, key, "silu", source.file);
    if (activation != "silu" && activation != "swish") {
      source.unsupported(fmt::format("{} '{}' is not supported; supported: silu", key, printable(activation)));
    }
  }
}

Dtype parse_dtype(const ConfigSource& source) {
  const char* key = source.has("dtype") ? "dtype" : "torch_dtype";
  const std::string name = json_string_or(source.json, key, "bfloat16", source.file);
  if (name == "bfloat16") {
    return Dtype::kBf16;
  }
  if (name == "float16") {
    return Dtype::kF16;
  }
  if (name == "float32") {
    return Dtype::kF32;
  }
  source.unsupported(
      fmt::format("{} '{}' is not supported; supported: bfloat16, float16, float32", key, printable(name)));
}

int32_t parse_num_experts(const ConfigSource& source) {
  const bool own = source.has("num_experts");
  const bool local = source.has("num_local_experts");
  if (!own && !local) {
    source.corrupt("key 'num_experts' (or 'num_local_experts') is missing");
  }
  const char* key = own ? "num_experts" : "num_local_experts";
  const int64_t count = json_int(source.json, key, source.file);
  if (own && local && json_int(source.json, "num_local_experts", source.file) != count) {
    source.corrupt(fmt::format("num_experts is {}, num_local_experts is {}: they must be equal", count,
                               json_int(source.json, "num_local_experts", source.file)));
  }
  return source.checked(key, count, 0, kExpertsMax);
}

// gpt-oss files hold the number under two names.
int32_t parse_top_k(const ConfigSource& source, const ModelConfig& config) {
  const char* other = "experts_per_token";
  if (config.family != Family::kGptOss || !source.has(other)) {
    return source.size("num_experts_per_tok", kExpertsMax);
  }
  const int32_t count = source.size(other, kExpertsMax);
  if (source.has("num_experts_per_tok") && source.size("num_experts_per_tok", kExpertsMax) != count) {
    source.corrupt(fmt::format("num_experts_per_tok is {}, {} is {}: they must be equal",
                               source.size("num_experts_per_tok", kExpertsMax), other, count));
  }
  return count;
}

void parse_gpt_oss_experts(const ConfigSource& source, ModelConfig& config) {
  const double limit = json_number_or(source.json, "swiglu_limit", 7.0, source.file);
  if (!(limit > 0.0)) {
    source.corrupt(fmt::format("swiglu_limit is {}, must be above 0", limit));
  }
  config.swiglu_limit = static_cast<float>(limit);
  const int32_t group = 32;  // inputs of one MXFP4 scale
  if (config.mxfp4_experts && (config.hidden_size % group != 0 || config.moe_intermediate_size % group != 0)) {
    source.unsupported(fmt::format("mxfp4 needs hidden_size {} and intermediate_size {} to be multiples of {}",
                                   config.hidden_size, config.moe_intermediate_size, group));
  }
}

// Qwen: layer i is MoE unless listed in mlp_only_layers or off the decoder_sparse_step grid.
void parse_qwen_sparse_layers(const ConfigSource& source, ModelConfig& config) {
  const int64_t step = json_int_or(source.json, "decoder_sparse_step", 1, source.file);
  if (step < 1) {
    source.corrupt(fmt::format("decoder_sparse_step is {}, must be at least 1", step));
  }
  for (int32_t i = 0; i < config.num_layers; ++i) {
    config.layer_is_moe[static_cast<size_t>(i)] = config.num_experts > 0 && (i + 1) % step == 0 ? 1 : 0;
  }
  if (!source.has("mlp_only_layers")) {
    return;
  }
  const Json& only = source.json.at("mlp_only_layers");
  if (!only.is_array()) {
    source.corrupt("key 'mlp_only_layers' must be a list of integers");
  }
  for (const Json& layer : only) {
    if (!layer.is_number_integer()) {
      source.corrupt("key 'mlp_only_layers' must be a list of integers");
    }
    const int64_t index = layer.get<int64_t>();
    if (index >= 0 && index < config.num_layers) {
      config.layer_is_moe[static_cast<size_t>(index)] = 0;
    }
  }
}

void parse_feed_forward(const ConfigSource& source, ModelConfig& config) {
  config.layer_is_moe.assign(static_cast<size_t>(config.num_layers), 0);
  if (config.family == Family::kLlama || config.family == Family::kQwen3) {
    config.intermediate_size = source.size("intermediate_size");
    config.mlp_bias = config.family == Family::kLlama && source.flag("mlp_bias", false);
    return;
  }
  config.num_experts = parse_num_experts(source);
  const bool qwen = config.family == Family::kQwen3Moe || config.family == Family::kQwen2Moe;
  if (config.num_experts == 0 && !qwen) {
    source.corrupt("the number of experts is 0");
  }
  if (qwen) {
    parse_qwen_sparse_layers(source, config);
  } else {
    std::fill(config.layer_is_moe.begin(), config.layer_is_moe.end(), uint8_t{1});
  }
  const bool any_dense =
      std::find(config.layer_is_moe.begin(), config.layer_is_moe.end(), 0) != config.layer_is_moe.end();
  if (any_dense) {
    config.intermediate_size = source.size("intermediate_size");
  }
  if (std::find(config.layer_is_moe.begin(), config.layer_is_moe.end(), 1) == config.layer_is_moe.end()) {
    config.num_experts = 0;  // every layer is dense: the model is
    return;
  }
  config.moe_intermediate_size = source.size(qwen ? "moe_intermediate_size" : "intermediate_size");
  config.top_k = parse_top_k(source, config);
  if (config.top_k > config.num_experts) {
    source.corrupt(fmt::format("num_experts_per_tok {} exceeds the {} experts", config.top_k, config.num_experts));
  }
  const bool always = config.family == Family::kMixtral || config.family == Family::kGptOss;
  config.norm_topk_prob = always || source.flag("norm_topk_prob", false);
  if (config.family == Family::kQwen2Moe) {
    config.shared_intermediate_size = source.size("shared_expert_intermediate_size");
  }
  if (config.family == Family::kGptOss) {
    parse_gpt_oss_experts(source, config);
  }
}

int32_t token_id(const ConfigSource& source, const char* key, const Json& value) {
  if (!value.is_number_integer()) {
    source.corrupt(fmt::format("key '{}' must be an integer or a list of them", key));
  }
  return source.checked(key,
                        value.is_number_unsigned()
                            ? static_cast<int64_t>(std::min<uint64_t>(value.get<uint64_t>(), INT64_MAX))
                            : value.get<int64_t>(),
                        0, INT32_MAX);
}

// Adds `eos_token_id` (an integer or a list) to the stop set.
void add_eos(const ConfigSource& source, std::vector<int32_t>& ids) {
  if (!source.has("eos_token_id")) {
    return;
  }
  const Json& value = source.json.at("eos_token_id");
  const auto add = [&](const Json& item) {
    const int32_t id = token_id(source, "eos_token_id", item);
    if (std::find(ids.begin(), ids.end(), id) == ids.end()) {
      ids.push_back(id);
    }
  };
  if (!value.is_array()) {
    return add(value);
  }
  for (const Json& item : value) {
    add(item);
  }
}

void parse_generation(const ConfigSource& source, ModelConfig& config) {
  add_eos(source, config.eos_token_ids);
  if (config.bos_token_id < 0 && source.has("bos_token_id")) {
    config.bos_token_id = token_id(source, "bos_token_id", source.json.at("bos_token_id"));
  }
  const auto at_least = [&](const char* key, double least) {
    const double value = json_number_or(source.json, key, -1.0, source.file);
    if (source.has(key) && value < least) {
      source.corrupt(fmt::format("key '{}' is {}, must be at least {}", key, value, least));
    }
    return static_cast<float>(value);
  };
  config.default_temperature = at_least("temperature", 0.0);
  config.default_top_p = at_least("top_p", 0.0);
  config.default_repetition_penalty = at_least("repetition_penalty", 0.0);
  if (source.has("top_k")) {
    config.default_top_k = source.checked("top_k", json_int(source.json, "top_k", source.file), 0, INT32_MAX);
  }
  if (!source.flag("do_sample", true)) {
    config.default_temperature = 0.0f;
  }
}

}  // namespace

ModelConfig parse_model_config(const std::string& config_json, const std::string& generation_json,
                               const std::string& file) {
  const Json json = parse_json(config_json, file);
  const ConfigSource source{json, file};
  if (!json.is_object()) {
    source.corrupt("not a JSON object");
  }
  ModelConfig config;
  parse_architecture(source, config);
  parse_quantization(source, config);
  refuse_unimplemented(source);
  config.dtype = parse_dtype(source);
  config.hidden_size = source.size("hidden_size");
  config.num_layers = source.size("num_hidden_layers", kLayersMax);
  config.vocab_size = source.size("vocab_size");
  config.max_position = source.size("max_position_embeddings", kPositionsMax);
  const double eps = json_number(json, "rms_norm_eps", file);
  if (!(eps > 0.0 && eps < 1.0)) {
    source.corrupt(fmt::format("rms_norm_eps is {}, must lie between 0 and 1", eps));
  }
  config.rms_norm_eps = static_cast<float>(eps);
  config.tie_embeddings = source.flag("tie_word_embeddings", false);
  parse_attention(source, config);
  parse_windows(source, config);
  parse_feed_forward(source, config);
  parse_positions(source, config);
  if (source.has("bos_token_id")) {
    config.bos_token_id = token_id(source, "bos_token_id", json.at("bos_token_id"));
  }
  add_eos(source, config.eos_token_ids);
  if (!generation_json.empty()) {
    const std::string generation_file = std::filesystem::path(file).replace_filename("generation_config.json");
    const Json generation = parse_json(generation_json, generation_file);
    const ConfigSource generation_source{generation, generation_file};
    if (!generation.is_object()) {
      generation_source.corrupt("not a JSON object");
    }
    parse_generation(generation_source, config);
  }
  return config;
}

ModelConfig load_model_config(const std::string& dir) {
  const std::string file = dir + "/config.json";
  const std::string generation_file = dir + "/generation_config.json";
  const std::string text = read_text(file);
  return parse_model_config(text, std::filesystem::exists(generation_file) ? read_text(generation_file) : "", file);
}

}  // namespace moelora
