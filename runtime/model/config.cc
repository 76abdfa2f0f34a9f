// SPDX-License-Identifier: Apache-2.0
// config.json to numbers. A key whose absence would change the result is required unless every release of the
// family agrees on its default; a value that the runtime does not implement is refused by name. Sizes are bounded
// here, so that later products of them cannot overflow 32 bits per matrix dimension.
#include "runtime/model/config.h"

#include <algorithm>
#include <array>
#include <filesystem>

#include <fmt/format.h>

#include "kernels/base/error.h"
#include "runtime/io/json.h"
#include "runtime/model/rope.h"

namespace moelora {
namespace {

constexpr int64_t kWidthMax = int64_t{1} << 24;  // any matrix dimension, vocabulary included
constexpr int64_t kLayersMax = 4096;
constexpr int64_t kExpertsMax = 4096;
constexpr int64_t kPositionsMax = int64_t{1} << 30;

struct FamilyName {
  const char* architecture;
  const char* model_type;
  Family family;
};
constexpr std::array<FamilyName, 6> kFamilies = {{
    {"Qwen3MoeForCausalLM", "qwen3_moe", Family::kQwen3Moe},
    {"Qwen2MoeForCausalLM", "qwen2_moe", Family::kQwen2Moe},
    {"MixtralForCausalLM", "mixtral", Family::kMixtral},
    {"OlmoeForCausalLM", "olmoe", Family::kOlmoe},
    {"LlamaForCausalLM", "llama", Family::kLlama},
    {"Qwen3ForCausalLM", "qwen3", Family::kQwen3},
}};

// config.json with its file name, for messages.
struct Source {
  const Json& json;
  const std::string& file;

  [[nodiscard]] bool has(const char* key) const {
    const auto found = json.find(key);
    return found != json.end() && !found->is_null();
  }
  [[noreturn]] void corrupt(const std::string& what) const {
    throw Error(Status::kCorrupt, fmt::format("{}: {}", file, what));
  }
  [[noreturn]] void unsupported(const std::string& what) const {
    throw Error(Status::kUnsupported, fmt::format("{}: {}", file, what));
  }
  [[nodiscard]] int32_t checked(const char* key, int64_t value, int64_t least, int64_t most) const {
    if (value < least || value > most) {
      corrupt(fmt::format("key '{}' is {}, must lie in {} to {}", key, value, least, most));
    }
    return static_cast<int32_t>(value);
  }
  [[nodiscard]] int32_t size(const char* key, int64_t most = kWidthMax) const {
    return checked(key, json_int(json, key, file), 1, most);
  }
  [[nodiscard]] bool flag(const char* key, bool fallback) const { return json_bool_or(json, key, fallback, file); }
};

void parse_architecture(const Source& source, ModelConfig& config) {
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

// Refuses what would silently give other numbers.
void refuse_unimplemented(const Source& source) {
  for (const char* key : {"quantization_config", "compression_config"}) {
    if (!source.has(key)) {
      continue;
    }
    const Json& quantization = source.json.at(key);
    const std::string method =
        quantization.is_object() ? json_string_or(quantization, "quant_method", "unnamed", source.file) : "unnamed";
    source.unsupported(fmt::format("{}: quantisation method '{}' is not supported", key, printable(method)));
  }
  for (const char* key : {"hidden_act", "hidden_activation"}) {
    const std::string activation = json_string_or(source.json, key, "silu", source.file);
    if (activation != "silu" && activation != "swish") {
      source.unsupported(fmt::format("{} '{}' is not supported; supported: silu", key, printable(activation)));
    }
  }
}

Dtype parse_dtype(const Source& source) {
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

void parse_attention(const Source& source, ModelConfig& config) {
  config.num_heads = source.size("num_attention_heads", 65536);
  config.num_kv_heads =
      source.has("num_key_value_heads") ? source.size("num_key_value_heads", 65536) : config.num_heads;
  if (config.num_heads % config.num_kv_heads != 0) {
    source.corrupt(fmt::format("num_attention_heads {} is not a multiple of num_key_value_heads {}", config.num_heads,
                               config.num_kv_heads));
  }
  if (source.has("head_dim")) {
    config.head_dim = source.size("head_dim", 65536);
  } else {
    if (config.hidden_size % config.num_heads != 0) {
      source.corrupt(fmt::format("head_dim is missing and hidden_size {} is not a multiple of num_attention_heads {}",
                                 config.hidden_size, config.num_heads));
    }
    config.head_dim = config.hidden_size / config.num_heads;
  }
  if (config.head_dim % 2 != 0) {
    source.corrupt(fmt::format("head_dim {} is odd", config.head_dim));
  }
  (void)source.checked("num_attention_heads * head_dim", int64_t{config.num_heads} * config.head_dim, 1, kWidthMax);

  if (config.family == Family::kQwen2Moe) {
    config.qkv_bias = source.flag("qkv_bias", true);
  } else if (config.family != Family::kMixtral) {
    config.qkv_bias = config.o_bias = source.flag("attention_bias", false);
  }
  if (config.family == Family::kQwen3 || config.family == Family::kQwen3Moe) {
    config.qk_norm = QkNorm::kPerHead;
  }
  if (config.family == Family::kOlmoe) {
    config.qk_norm = QkNorm::kFull;
    const double clip = json_number_or(source.json, "clip_qkv", 0.0, source.file);
    if (source.has("clip_qkv") && !(clip > 0.0)) {
      source.corrupt(fmt::format("clip_qkv is {}, must be above 0", clip));
    }
    config.clip_qkv = static_cast<float>(clip);
  }
}

// Only Mixtral has a window here, the same in every layer.
void parse_window(const Source& source, ModelConfig& config) {
  const bool qwen =
      config.family == Family::kQwen3 || config.family == Family::kQwen3Moe || config.family == Family::kQwen2Moe;
  if (qwen && source.flag("use_sliding_window", false)) {
    source.unsupported("use_sliding_window true is not supported");
  }
  if (config.family == Family::kMixtral && source.has("sliding_window")) {
    config.sliding_window = source.size("sliding_window", kPositionsMax);
  }
  if (!source.has("layer_types")) {
    return;
  }
  const Json& types = source.json.at("layer_types");
  if (!types.is_array() || types.size() != static_cast<size_t>(config.num_layers)) {
    source.corrupt(
        fmt::format("key 'layer_types' must be a list of num_hidden_layers = {} strings", config.num_layers));
  }
  const char* expected = config.sliding_window > 0 ? "sliding_attention" : "full_attention";
  for (const Json& type : types) {
    if (!type.is_string()) {
      source.corrupt("key 'layer_types' must be a list of strings");
    }
    const std::string name = type.get<std::string>();
    if (name != expected) {
      source.unsupported(fmt::format("layer_types '{}' is not supported here; supported: {} in every layer",
                                     printable(name), expected));
    }
  }
}

int32_t parse_num_experts(const Source& source) {
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

// Qwen: layer i is MoE unless listed in mlp_only_layers or off the decoder_sparse_step grid.
void parse_qwen_sparse_layers(const Source& source, ModelConfig& config) {
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

void parse_feed_forward(const Source& source, ModelConfig& config) {
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
  config.top_k = source.size("num_experts_per_tok", kExpertsMax);
  if (config.top_k > config.num_experts) {
    source.corrupt(fmt::format("num_experts_per_tok {} exceeds the {} experts", config.top_k, config.num_experts));
  }
  config.norm_topk_prob = config.family == Family::kMixtral || source.flag("norm_topk_prob", false);
  if (config.family == Family::kQwen2Moe) {
    config.shared_intermediate_size = source.size("shared_expert_intermediate_size");
  }
}

void parse_rope_into(const Source& source, ModelConfig& config) {
  const double default_theta = config.family == Family::kMixtral ? 1e6 : 1e4;
  const char* layer_type = config.sliding_window > 0 ? "sliding_attention" : "full_attention";
  const RopeParameters rope = parse_rope(source.json, config.max_position, default_theta, layer_type, source.file);
  const RopeTable table = rope_table(rope, config.head_dim);
  config.rope_theta = rope.theta;
  config.rope_type = rope.type;
  config.inv_freq.assign(table.inv_freq.size(), 0.0f);
  std::transform(table.inv_freq.begin(), table.inv_freq.end(), config.inv_freq.begin(),
                 [](double value) { return static_cast<float>(value); });
  config.rope_scale = static_cast<float>(table.attention_factor);
}

int32_t token_id(const Source& source, const char* key, const Json& value) {
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
void add_eos(const Source& source, std::vector<int32_t>& ids) {
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

void parse_generation(const Source& source, ModelConfig& config) {
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
  const Source source{json, file};
  if (!json.is_object()) {
    source.corrupt("not a JSON object");
  }
  ModelConfig config;
  parse_architecture(source, config);
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
  parse_window(source, config);
  parse_feed_forward(source, config);
  parse_rope_into(source, config);
  if (source.has("bos_token_id")) {
    config.bos_token_id = token_id(source, "bos_token_id", json.at("bos_token_id"));
  }
  add_eos(source, config.eos_token_ids);
  if (!generation_json.empty()) {
    const std::string generation_file = std::filesystem::path(file).replace_filename("generation_config.json");
    const Json generation = parse_json(generation_json, generation_file);
    const Source generation_source{generation, generation_file};
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
