// SPDX-License-Identifier: Apache-2.0
// The attention's part of config.json: heads and biases, how far each layer sees, RoPE.
#include <algorithm>

#include "runtime/model/config_source.h"
#include "runtime/model/rope.h"

namespace moelora {
namespace {

constexpr const char* kFull = "full_attention";
constexpr const char* kSliding = "sliding_attention";

bool any_layer(const ModelConfig& config, bool sliding) {
  return std::any_of(config.layer_window.begin(), config.layer_window.end(),
                     [sliding](int32_t window) { return (window > 0) == sliding; });
}

// The strings of `layer_types`, one a layer; empty if the key is absent.
std::vector<std::string> read_layer_types(const ConfigSource& source, const ModelConfig& config) {
  std::vector<std::string> names;
  if (!source.has("layer_types")) {
    return names;
  }
  const Json& types = source.json.at("layer_types");
  if (!types.is_array() || types.size() != static_cast<size_t>(config.num_layers)) {
    source.corrupt(
        fmt::format("key 'layer_types' must be a list of num_hidden_layers = {} strings", config.num_layers));
  }
  for (const Json& type : types) {
    if (!type.is_string()) {
      source.corrupt("key 'layer_types' must be a list of strings");
    }
    names.push_back(type.get<std::string>());
  }
  return names;
}

// gpt-oss: layers of both kinds, by turns where the config does not say.
void parse_gpt_oss_windows(const ConfigSource& source, const std::vector<std::string>& types, ModelConfig& config) {
  if (source.json.contains("sliding_window") && !source.has("sliding_window")) {
    source.unsupported("sliding_window null is not supported");
  }
  const int32_t window = source.has("sliding_window") ? source.size("sliding_window", kPositionsMax) : 128;
  for (size_t i = 0; i < config.layer_window.size(); ++i) {
    const std::string name = types.empty() ? (i % 2 == 0 ? kSliding : kFull) : types[i];
    if (name != kSliding && name != kFull) {
      source.unsupported(
          fmt::format("layer_types '{}' is not supported here; supported: {}, {}", printable(name), kSliding, kFull));
    }
    config.layer_window[i] = name == kSliding ? window : 0;
  }
}

}  // namespace

void parse_attention(const ConfigSource& source, ModelConfig& config) {
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
    config.qkv_bias = config.o_bias = source.flag("attention_bias", config.family == Family::kGptOss);
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

void parse_windows(const ConfigSource& source, ModelConfig& config) {
  const bool qwen =
      config.family == Family::kQwen3 || config.family == Family::kQwen3Moe || config.family == Family::kQwen2Moe;
  if (qwen && source.flag("use_sliding_window", false)) {
    source.unsupported("use_sliding_window true is not supported");
  }
  config.layer_window.assign(static_cast<size_t>(config.num_layers), 0);
  const std::vector<std::string> types = read_layer_types(source, config);
  if (config.family == Family::kGptOss) {
    return parse_gpt_oss_windows(source, types, config);
  }
  // Only Mixtral has a window besides, the same in every layer.
  const bool sliding = config.family == Family::kMixtral && source.has("sliding_window");
  if (sliding) {
    std::fill(config.layer_window.begin(), config.layer_window.end(), source.size("sliding_window", kPositionsMax));
  }
  const char* expected = sliding ? kSliding : kFull;
  for (const std::string& name : types) {
    if (name != expected) {
      source.unsupported(fmt::format("layer_types '{}' is not supported here; supported: {} in every layer",
                                     printable(name), expected));
    }
  }
}

void parse_positions(const ConfigSource& source, ModelConfig& config) {
  const double default_theta = config.family == Family::kMixtral ? 1e6 : config.family == Family::kGptOss ? 1.5e5 : 1e4;
  const auto table_of = [&](const char* layer_type) {
    const RopeParameters rope = parse_rope(source.json, config.max_position, default_theta, layer_type, source.file);
    config.rope_theta = rope.theta;
    config.rope_type = rope.type;
    return rope_table(rope, config.head_dim);
  };
  const bool full = any_layer(config, false);
  const RopeTable table = table_of(full ? kFull : kSliding);
  if (full && any_layer(config, true)) {
    const RopeTable other = table_of(kSliding);
    if (other.inv_freq != table.inv_freq || other.attention_factor != table.attention_factor) {
      source.unsupported("rope_parameters that differ by layer type are not supported");
    }
  }
  config.inv_freq.assign(table.inv_freq.size(), 0.0f);
  std::transform(table.inv_freq.begin(), table.inv_freq.end(), config.inv_freq.begin(),
                 [](double value) { return static_cast<float>(value); });
  config.rope_scale = static_cast<float>(table.attention_factor);
}

}  // namespace moelora
