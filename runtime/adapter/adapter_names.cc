// SPDX-License-Identifier: Apache-2.0
// See adapter_names.h. The steps are: drop wrapper segments, split the LoRA suffix, settle the prefix, then look
// the rest up in small tables.
#include "runtime/adapter/adapter_names.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <string_view>
#include <vector>

#include "kernels/lora/adapter_layout.h"

namespace moelora {
namespace {

using Segments = std::vector<std::string_view>;

Segments split_segments(std::string_view name) {
  Segments segments;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    segments.push_back(name.substr(begin, end - begin));
    begin = end + 1;
  }
  return segments;
}

std::string join_segments(const Segments& segments, size_t begin) {
  std::string text;
  for (size_t i = begin; i < segments.size(); ++i) {
    if (i > begin) {
      text += '.';
    }
    text += segments[i];
  }
  return text;
}

bool starts_with(const Segments& segments, std::initializer_list<std::string_view> prefix) {
  return segments.size() >= prefix.size() && std::equal(prefix.begin(), prefix.end(), segments.begin());
}

void drop_wrappers(Segments& segments) {
  std::erase_if(segments, [](std::string_view s) { return s == "_orig_mod" || s == "_fsdp_wrapped_module"; });
  for (;;) {
    if (starts_with(segments, {"base_model", "model"}) && segments.size() > 2) {
      segments.erase(segments.begin(), segments.begin() + 2);
    } else if (starts_with(segments, {"module"}) && segments.size() > 1) {
      segments.erase(segments.begin());
    } else {
      return;
    }
  }
}

NameMatch refused(NameVerdict verdict, std::string reason) {
  NameMatch match;
  match.verdict = verdict;
  match.reason = std::move(reason);
  return match;
}

// Names of other tools and of other kinds of adapters.
std::optional<std::string> foreign_name(const std::string& name) {
  constexpr std::array<std::string_view, 10> kForeign = {"lora_down",         "lora_up",  "lora_unet", "lora.down.",
                                                         "lora.up.",          "hada_",    "lokr_",     "vera_lambda",
                                                         "prompt_embeddings", "lora_diag"};
  for (std::string_view pattern : kForeign) {
    if (name.find(pattern) != std::string::npos) {
      return "'" + std::string(pattern) + "' belongs to another kind of adapter";
    }
  }
  if (name.find("experts.shared.") != std::string::npos) {
    return "the 'experts.shared' layout is not implemented";
  }
  if (name.find("gate_up_projs.") != std::string::npos || name.find("down_projs.") != std::string::npos) {
    return "'gate_up_projs' and 'down_projs' are names of a 4-bit re-packing of another base";
  }
  return std::nullopt;
}

std::optional<std::string> unsupported_part(const std::string& name) {
  if (name.find("lora_embedding_") != std::string::npos) {
    return "LoRA on embeddings (lora_embedding_A, lora_embedding_B) is not implemented";
  }
  if (name.find("lora_magnitude_vector") != std::string::npos) {
    return "DoRA (lora_magnitude_vector) is not implemented";
  }
  if (name.find("trainable_tokens_delta") != std::string::npos || name.find("token_adapter") != std::string::npos) {
    return "trained token rows (trainable_token_indices) are not implemented";
  }
  return std::nullopt;
}

// Cuts `.lora_A[.NAME].weight`, `.lora_A[.NAME]`, `.lora_B[.NAME].bias` and the like off the segments.
std::optional<TensorPart> cut_suffix(Segments& segments) {
  for (size_t i = 1; i < segments.size(); ++i) {
    const bool is_a = segments[i] == "lora_A";
    if (!is_a && segments[i] != "lora_B") {
      continue;
    }
    const size_t tail = segments.size() - i - 1;
    const std::string_view last = segments.back();
    const bool bias = tail > 0 && last == "bias";
    if (tail > 2 || (tail == 2 && last != "weight" && !bias) || (bias && is_a)) {
      return std::nullopt;
    }
    segments.resize(i);
    return bias ? TensorPart::kBias : is_a ? TensorPart::kA : TensorPart::kB;
  }
  return std::nullopt;
}

// One spelling of the prefix and of the block names: model.layers.N.{self_attn,mlp}.
void settle_prefix(Segments& segments) {
  if (starts_with(segments, {"model", "language_model"}) || starts_with(segments, {"language_model", "model"})) {
    segments.erase(segments.begin());
    segments[0] = "model";
  } else if (starts_with(segments, {"layers"})) {
    segments.insert(segments.begin(), "model");
  }
  if (segments.size() > 3 && segments[3] == "attn") {
    segments[3] = "self_attn";
  }
}

std::optional<int32_t> parse_index(std::string_view text) {
  int32_t value = 0;
  const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = fault == std::errc() && end == text.data() + text.size() && text[0] != '-' && text[0] != '+';
  const bool canonical = text.size() == 1 || (!text.empty() && text[0] != '0');  // "01" would be a second name for 1
  return whole && canonical ? std::optional<int32_t>(value) : std::nullopt;
}

struct Named {
  std::string_view name;
  int32_t index;
};

template <size_t N>
std::optional<int32_t> look_up(const std::array<Named, N>& table, std::string_view name) {
  for (const Named& entry : table) {
    if (entry.name == name) {
      return entry.index;
    }
  }
  return std::nullopt;
}

constexpr int32_t number(LoraModule module) {
  return static_cast<int32_t>(module);
}
constexpr int32_t number(ExpertModule module) {
  return static_cast<int32_t>(module);
}

constexpr std::array<Named, 4> kAttention = {{{"q_proj", number(LoraModule::kQ)},
                                              {"k_proj", number(LoraModule::kK)},
                                              {"v_proj", number(LoraModule::kV)},
                                              {"o_proj", number(LoraModule::kO)}}};
constexpr std::array<Named, 3> kMlp = {{{"gate_proj", number(LoraModule::kGate)},
                                        {"up_proj", number(LoraModule::kUp)},
                                        {"down_proj", number(LoraModule::kDown)}}};
constexpr std::array<Named, 3> kShared = {{{"gate_proj", number(LoraModule::kSharedGate)},
                                           {"up_proj", number(LoraModule::kSharedUp)},
                                           {"down_proj", number(LoraModule::kSharedDown)}}};
constexpr std::array<Named, 6> kExpert = {{{"gate_proj", number(ExpertModule::kGate)},
                                           {"up_proj", number(ExpertModule::kUp)},
                                           {"down_proj", number(ExpertModule::kDown)},
                                           {"w1", number(ExpertModule::kGate)},
                                           {"w3", number(ExpertModule::kUp)},
                                           {"w2", number(ExpertModule::kDown)}}};
constexpr std::array<Named, 4> kStacked = {{{"w1", number(ExpertModule::kGate)},
                                            {"w3", number(ExpertModule::kUp)},
                                            {"w2", number(ExpertModule::kDown)},
                                            {"down_proj", number(ExpertModule::kDown)}}};

NameMatch target(int32_t layer, TargetKind kind, int32_t index, int32_t expert = -1) {
  NameMatch match;
  match.verdict = NameVerdict::kTarget;
  match.target = {layer, kind, expert, index};
  return match;
}

NameMatch no_module(const std::string& what) {
  return refused(NameVerdict::kUnknown, what);
}

// `rest` follows "model.layers.N.mlp.experts".
NameMatch match_experts(int32_t layer, const Segments& rest, const ModelConfig& config) {
  if (rest.empty()) {
    return target(layer, TargetKind::kExpertsOuter, -1);
  }
  if (rest[0] == "base_layer") {
    if (rest.size() == 1) {
      return target(layer, TargetKind::kExpertsInner, -1);
    }
    return refused(NameVerdict::kUnsupported,
                   "three or more target_parameters on one experts module are not implemented");
  }
  if (rest.size() == 1) {
    if (rest[0] == "gate_up_proj") {
      return target(layer, TargetKind::kStackedGateUp, -1);
    }
    const auto module = look_up(kStacked, rest[0]);
    return module ? target(layer, TargetKind::kStacked, *module) : no_module("no such module in the experts");
  }
  const auto expert = parse_index(rest[0]);
  const auto module = rest.size() == 2 ? look_up(kExpert, rest[1]) : std::nullopt;
  if (!expert || !module) {
    return no_module("no such module in the experts");
  }
  if (*expert >= config.num_experts) {
    return no_module("expert index " + std::to_string(*expert) + ", but the model has " +
                     std::to_string(config.num_experts) + " experts");
  }
  return target(layer, TargetKind::kExpert, *module, *expert);
}

// `rest` follows "model.layers.N.mlp".
NameMatch match_mlp(int32_t layer, const Segments& rest, const ModelConfig& config) {
  const bool moe = config.layer_is_moe[static_cast<size_t>(layer)] != 0;
  if (rest.size() == 1 && rest[0] == "gate_up_proj") {
    return refused(NameVerdict::kUnsupported,
                   "the merged module gate_up_proj is not implemented; store gate_proj and up_proj apart");
  }
  if (rest.size() == 1 && !moe) {
    const auto module = look_up(kMlp, rest[0]);
    return module ? target(layer, TargetKind::kDense, *module) : no_module("the dense layer has no such module");
  }
  if (!moe || rest.empty()) {
    return no_module("the dense layer has no such module");
  }
  if (rest[0] == "experts") {
    return match_experts(layer, Segments(rest.begin() + 1, rest.end()), config);
  }
  if (rest.size() == 1 && rest[0] == (config.family == Family::kGptOss ? "router" : "gate")) {
    return target(layer, TargetKind::kDense, number(LoraModule::kRouter));
  }
  if (config.shared_intermediate_size > 0) {
    if (rest.size() == 1 && rest[0] == "shared_expert_gate") {
      return target(layer, TargetKind::kDense, number(LoraModule::kSharedExpertGate));
    }
    if (rest.size() == 2 && rest[0] == "shared_expert") {
      if (const auto module = look_up(kShared, rest[1])) {
        return target(layer, TargetKind::kDense, *module);
      }
    }
  }
  return no_module("the MoE layer has no such module");
}

NameMatch match_layer_module(const Segments& segments, const ModelConfig& config) {
  const auto layer = parse_index(segments[2]);
  if (!layer) {
    return no_module("'" + std::string(segments[2]) + "' is not a layer index");
  }
  if (*layer >= config.num_layers) {
    return no_module("layer index " + std::to_string(*layer) + ", but the model has " +
                     std::to_string(config.num_layers) + " layers");
  }
  const Segments rest(segments.begin() + 4, segments.end());
  if (segments[3] == "self_attn") {
    if (rest.size() == 1 && rest[0] == "qkv_proj") {
      return refused(NameVerdict::kUnsupported,
                     "the merged module qkv_proj is not implemented; store q_proj, k_proj and v_proj apart");
    }
    const auto module = rest.size() == 1 ? look_up(kAttention, rest[0]) : std::nullopt;
    return module ? target(*layer, TargetKind::kDense, *module) : no_module("the attention has no such module");
  }
  if (segments[3] == "mlp" || (segments[3] == "block_sparse_moe" && config.family == Family::kMixtral)) {
    return match_mlp(*layer, rest, config);
  }
  return no_module("the layer has no such module");
}

NameMatch match_module(const Segments& segments, const ModelConfig& config) {
  if (segments.size() > 4 && segments[0] == "model" && segments[1] == "layers") {
    return match_layer_module(segments, config);
  }
  const std::string_view last = segments.back();
  if (last == "lm_head" || last == "unembed_tokens") {
    return refused(NameVerdict::kUnsupported, "LoRA on lm_head is not implemented");
  }
  if (last == "embed_tokens") {
    return refused(NameVerdict::kUnsupported, "LoRA on embed_tokens is not implemented");
  }
  return no_module("the model has no such module");
}

// A tensor without lora_: a whole tensor of the base, saved because the module or its bias was trained in full.
NameMatch match_whole_tensor(Segments segments, const ModelConfig& config) {
  const bool bias = segments.back() == "bias";
  const bool copy = std::find(segments.begin(), segments.end(), "base_layer") != segments.end();
  std::erase_if(segments, [](std::string_view s) {
    return s == "modules_to_save" || s == "base_layer" || s == "original_module" || s == "default";
  });
  if (segments.size() < 2 || (segments.back() != "weight" && !bias)) {
    return no_module("neither a LoRA matrix nor a tensor of the base model");
  }
  segments.pop_back();
  const std::string_view module = segments.back();
  const bool plain = module == "lm_head" || module == "unembed_tokens" || module == "embed_tokens" ||
                     module == "norm" || module.ends_with("layernorm") || module.ends_with("_norm");
  const NameMatch linear = match_module(segments, config);
  if ((copy && linear.verdict == NameVerdict::kUnsupported) || (!plain && linear.verdict == NameVerdict::kUnknown)) {
    return linear;  // a copy of the base is saved only beside a LoRA on the same module
  }
  if (bias) {
    return refused(NameVerdict::kUnsupported, "a replaced bias (bias: all or lora_only) is not implemented");
  }
  return refused(NameVerdict::kUnsupported, "a whole tensor of the base (modules_to_save) is not implemented");
}

}  // namespace

NameMatch match_tensor_name(const std::string& stored, const ModelConfig& config) {
  if (stored.find("lora_velora_embed") != std::string::npos) {  // used by the training's backward pass only
    NameMatch match;
    match.verdict = NameVerdict::kIgnored;
    return match;
  }
  if (const auto reason = foreign_name(stored)) {
    return refused(NameVerdict::kUnsupported, *reason);
  }
  if (const auto reason = unsupported_part(stored)) {
    return refused(NameVerdict::kUnsupported, *reason);
  }
  Segments segments = split_segments(stored);
  drop_wrappers(segments);
  const auto part = cut_suffix(segments);
  const std::string path = join_segments(segments, 0);
  settle_prefix(segments);
  if (!part) {
    const bool lora = stored.find("lora_") != std::string::npos;
    return lora ? no_module("not a name of a LoRA matrix that is known") : match_whole_tensor(segments, config);
  }
  NameMatch match = match_module(segments, config);
  match.part = *part;
  match.path = path;
  if (match.verdict == NameVerdict::kTarget && match.target.kind == TargetKind::kExpertsInner) {
    match.path.resize(path.size() - std::string_view(".base_layer").size());  // the wrapper, not the module
  }
  return match;
}

}  // namespace moelora
