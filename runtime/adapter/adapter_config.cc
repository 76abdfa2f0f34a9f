// SPDX-License-Identifier: Apache-2.0
// See adapter_config.h. Each key of PEFT's LoraConfig is in exactly one group: read, ignored, or refused unless
// null. A key in none of them is one that this version has never seen.
#include "runtime/adapter/adapter_config.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <string_view>

#include "kernels/base/error.h"
#include "runtime/io/json.h"

namespace moelora {
namespace {

constexpr std::array<std::string_view, 35> kKnownKeys = {
    // read
    "peft_type", "peft_version", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
    "target_parameters", "modules_to_save", "bias", "fan_in_fan_out", "use_dora", "lora_bias",
    "trainable_token_indices", "init_lora_weights", "auto_mapping", "task_type", "lora_B_layout",
    // ignored: bookkeeping and training only, or the tensors' names decide
    "base_model_name_or_path", "revision", "inference_mode", "qalora_group_size", "lora_dropout", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "megatron_core", "runtime_config", "ensure_weight_tying",
    "exclude_modules", "layers_to_transform", "layers_pattern", "velora_config"};

struct Refusal {
  std::string_view key;
  std::string_view advice;
};
constexpr std::array<Refusal, 8> kRefusedKeys = {{
    {"alora_invocation_tokens", "activated LoRA is not implemented"},
    {"use_bdlora", "block-diagonal LoRA is not implemented; expand the blocks and save a plain LoRA"},
    {"use_qalora", "QA-LoRA is not implemented; merge it into its base"},
    {"layer_replication", "the adapter is for a base with repeated layers; build that base"},
    {"arrow_config", "Arrow routing is not implemented"},
    {"monteclora_config", "MonteCLoRA is not implemented"},
    {"kasa_config", "KaSA needs its own truncated base; merge it"},
    {"megatron_config", "Megatron layers are not implemented; convert the adapter"},
}};

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

[[noreturn]] void refuse(const std::string& source, const std::string& key, const Json& value,
                         std::string_view advice) {
  throw Error{Status::kUnsupported,
              source + ": " + key + " = " + printable(value.dump(), 80) + ": " + std::string(advice)};
}

const Json* find_value(const Json& root, const char* key) {
  const auto it = root.find(key);
  return it == root.end() || it->is_null() ? nullptr : &*it;
}

bool is_set(const Json& value) {
  return !(value.is_null() || (value.is_boolean() && !value.get<bool>()) || (value.is_structured() && value.empty()));
}

std::vector<std::string> string_list(const Json& root, const char* key, const std::string& source) {
  const Json* value = find_value(root, key);
  std::vector<std::string> list;
  if (value == nullptr) {
    return list;
  }
  if (!value->is_array()) {
    throw Error{Status::kCorrupt, source + ": '" + key + "' must be a list of strings"};
  }
  for (const Json& entry : *value) {
    if (!entry.is_string()) {
      throw Error{Status::kCorrupt, source + ": '" + key + "' must be a list of strings"};
    }
    list.push_back(entry.get<std::string>());
  }
  return list;
}

int32_t checked_rank(int64_t rank, const std::string& source, const std::string& key) {
  if (rank < 1 || rank > INT32_MAX) {
    throw Error{Status::kAdapterMismatch,
                source + ": " + key + " = " + std::to_string(rank) + ": a rank is at least 1"};
  }
  return static_cast<int32_t>(rank);
}

double checked_alpha(double alpha, const std::string& source, const std::string& key) {
  if (!std::isfinite(alpha) || std::abs(alpha) > 1e30) {
    throw Error{Status::kAdapterMismatch, source + ": " + key + " is not a usable number"};
  }
  return alpha;
}

// Values are ranks (`integer`) or alphas.
void read_patterns(const Json& root, const char* key, bool integer, PatternTable& table, const std::string& source) {
  const Json* object = find_value(root, key);
  if (object == nullptr) {
    return;
  }
  if (!object->is_object()) {
    throw Error{Status::kCorrupt, source + ": '" + key + "' must be an object"};
  }
  const std::string place = source + ", " + key;
  for (const auto& [pattern, value] : object->items()) {
    const double number = integer ? checked_rank(json_int(*object, pattern, place), place, pattern)
                                  : checked_alpha(json_number(*object, pattern, place), place, pattern);
    table.add(pattern, number, place);
  }
}

PeftVersion parse_version(const std::string& text) {
  PeftVersion version;
  if (text.empty()) {
    return version;
  }
  const int count = std::sscanf(text.c_str(), "%d.%d.%d", &version.major, &version.minor, &version.patch);
  if (count < 2 || version.major < 0 || version.minor < 0 || version.patch < 0) {
    version.major = -2;
  }
  version.dev = text.find("dev") != std::string::npos || text.find("rc") != std::string::npos;
  return version;
}

void check_peft_type(const Json& root, const std::string& source) {
  const Json* type = find_value(root, "peft_type");
  if (type == nullptr) {
    if (find_value(root, "r") == nullptr) {
      throw Error{Status::kCorrupt, source + ": neither 'peft_type' nor 'r': not the config of a LoRA adapter"};
    }
    return;
  }
  if (lower(json_string_or(root, "peft_type", "", source)) != "lora") {
    refuse(source, "peft_type", *type, "only LORA is implemented");
  }
}

void check_init(const Json& root, const std::string& source) {
  const Json* init = find_value(root, "init_lora_weights");
  if (init == nullptr || init->is_boolean()) {
    return;
  }
  const std::string kind = lower(json_string_or(root, "init_lora_weights", "", source));
  if (kind == "gaussian" || kind == "orthogonal" || kind == "eva" || kind == "mica") {
    return;
  }
  const bool residual =
      kind.starts_with("pissa") || kind == "olora" || kind == "corda" || kind == "lora_ga" || kind == "loftq";
  refuse(source, "init_lora_weights", *init,
         residual ? "needs the residual base; convert with path_initial_model_for_weight_conversion"
                  : "this way of initialising is not known, so it may need a changed base");
}

void check_refused_keys(const Json& root, const std::string& source) {
  for (const Refusal& refusal : kRefusedKeys) {
    const Json* value = find_value(root, std::string(refusal.key).c_str());
    if (value != nullptr && is_set(*value)) {
      refuse(source, std::string(refusal.key), *value, refusal.advice);
    }
  }
  if (json_bool_or(root, "use_dora", false, source)) {
    refuse(source, "use_dora", root["use_dora"], "DoRA is not implemented; merge the adapter into its base");
  }
  const Json* tokens = find_value(root, "trainable_token_indices");
  if (tokens != nullptr && is_set(*tokens)) {
    refuse(source, "trainable_token_indices", *tokens, "trained token rows are not implemented");
  }
}

void check_unknown_keys(const Json& root, const std::string& source, std::vector<std::string>& warnings) {
  for (const auto& [key, value] : root.items()) {
    const bool refused =
        std::any_of(kRefusedKeys.begin(), kRefusedKeys.end(), [&](const Refusal& r) { return r.key == key; });
    if (refused || std::find(kKnownKeys.begin(), kKnownKeys.end(), key) != kKnownKeys.end()) {
      continue;
    }
    const bool variant = (key.ends_with("_config") && value.is_structured()) ||
                         (key.starts_with("use_") && value.is_boolean() && value.get<bool>());
    if (variant) {
      refuse(source, key, value, "unknown key that names a variant of LoRA");
    }
    warnings.push_back(source + ": unknown key '" + key + "' is ignored");
  }
}

void read_targets(const Json& root, AdapterConfig& config, const std::string& source) {
  const Json* modules = find_value(root, "target_modules");
  if (modules != nullptr && modules->is_string()) {
    const std::string text = modules->get<std::string>();
    if (text != "all-linear") {
      config.target_regex = text;
    }
  } else {
    config.target_modules = string_list(root, "target_modules", source);
  }
  config.target_parameters = string_list(root, "target_parameters", source);
  config.modules_to_save = string_list(root, "modules_to_save", source);
}

void read_layout(const Json& root, AdapterConfig& config, const std::string& source) {
  if (const Json* mapping = find_value(root, "auto_mapping"); mapping != nullptr && mapping->is_object()) {
    config.unsloth_origin = json_bool_or(*mapping, "unsloth_fixed", false, source + ", auto_mapping");
  }
  const Json* layout = find_value(root, "lora_B_layout");
  if (layout == nullptr) {
    return;
  }
  const std::string kind = json_string_or(root, "lora_B_layout", "", source);
  if (kind != "rank_major" && kind != "grouped_by_expert") {
    refuse(source, "lora_B_layout", *layout, "known are rank_major and grouped_by_expert");
  }
  config.b_layout = kind == "rank_major" ? ExpertBLayout::kRankMajor : ExpertBLayout::kGroupedByExpert;
}

}  // namespace

AdapterConfig parse_adapter_config(const std::string& json, const std::string& source) {
  const Json root = parse_json(json, source);
  if (!root.is_object()) {
    throw Error{Status::kCorrupt, source + ": not a JSON object"};
  }
  AdapterConfig config;
  check_peft_type(root, source);
  check_refused_keys(root, source);
  check_init(root, source);
  check_unknown_keys(root, source, config.warnings);
  config.rank = checked_rank(json_int(root, "r", source), source, "r");
  config.alpha = checked_alpha(json_number(root, "lora_alpha", source), source, "lora_alpha");
  config.use_rslora = json_bool_or(root, "use_rslora", false, source);
  config.lora_bias = json_bool_or(root, "lora_bias", false, source);
  read_patterns(root, "rank_pattern", true, config.rank_pattern, source);
  read_patterns(root, "alpha_pattern", false, config.alpha_pattern, source);
  read_targets(root, config, source);
  read_layout(root, config, source);
  config.peft_version_text = json_string_or(root, "peft_version", "", source);
  config.peft_version = parse_version(config.peft_version_text);
  if (json_bool_or(root, "fan_in_fan_out", false, source)) {
    config.warnings.push_back(source + ": fan_in_fan_out is treated as false, as PEFT does for linear layers");
  }
  const std::string task = json_string_or(root, "task_type", "", source);
  if (!task.empty() && task != "CAUSAL_LM") {
    config.warnings.push_back(source + ": task_type is " + task + ", not CAUSAL_LM");
  }
  return config;
}

bool path_has_suffix(const std::string& path, const std::string& entry) {
  return path == entry ||
         (path.size() > entry.size() && path.ends_with(entry) && path[path.size() - entry.size() - 1] == '.');
}

}  // namespace moelora
