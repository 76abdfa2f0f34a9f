// SPDX-License-Identifier: Apache-2.0
// See adapter_experts.h. A shape never decides alone: sizes that fit only one orientation do, square ones follow
// their siblings, then PEFT's version (the rules are in the functions below, in that order).
#include "runtime/adapter/adapter_experts.h"

#include <algorithm>
#include <optional>

#include "kernels/base/error.h"

namespace moelora {
namespace {

// One ParamWrapper pair: A [E r, c_in], B [c_out, r E].
struct WrapperPair {
  const AdapterPair* pair;
  bool gate_up;
  int32_t in;  // natural widths of the parameter
  int32_t out;
  int32_t rank;
  float scale;
};

std::string shapes_text(const AdapterPair& pair) {
  return quoted(*pair.a) + " " + pair.a->shape_text() + " and " + quoted(*pair.b) + " " + pair.b->shape_text();
}

int32_t gate_up_out(const ModelConfig& model) {
  return 2 * model.moe_intermediate_size;
}

bool fits(const AdapterPair& pair, int32_t in, int32_t out) {
  const int64_t c_in = pair.a->shape[1];
  const int64_t c_out = pair.b->shape[0];
  return (c_in == in && c_out == out) || (c_in == out && c_out == in);
}

bool targets_parameter(const AdapterPair& pair, const char* parameter, const LoadContext& context) {
  for (const std::string& path : pattern_paths(pair.path, std::string(".") + parameter)) {
    for (const std::string& entry : context.adapter.target_parameters) {
      if (path_has_suffix(path, entry)) {
        return true;
      }
    }
  }
  return false;
}

// Which parameter the outer pair of a layer adapts: with an inner pair beside it down_proj, else what the config
// targets there, else what the sizes say.
bool outer_is_gate_up(const AdapterPair& pair, bool has_inner, const LoadContext& context) {
  if (has_inner) {
    return false;
  }
  const bool gate_up = targets_parameter(pair, "gate_up_proj", context);
  const bool down = targets_parameter(pair, "down_proj", context);
  if (gate_up != down) {
    return gate_up;
  }
  const ModelConfig& model = context.model;
  const bool fits_gate_up = fits(pair, model.hidden_size, gate_up_out(model));
  const bool fits_down = fits(pair, model.moe_intermediate_size, model.hidden_size);
  if (fits_gate_up == fits_down) {
    context.mismatch("tensors " + shapes_text(pair) + " fit neither gate_up_proj (" +
                     std::to_string(model.hidden_size) + " to " + std::to_string(gate_up_out(model)) +
                     ") nor down_proj (" + std::to_string(model.moe_intermediate_size) + " to " +
                     std::to_string(model.hidden_size) + ")");
  }
  return fits_gate_up;
}

WrapperPair check_wrapper(const AdapterPair& pair, bool gate_up, const LoadContext& context) {
  const ModelConfig& model = context.model;
  WrapperPair result{&pair,
                     gate_up,
                     gate_up ? model.hidden_size : model.moe_intermediate_size,
                     gate_up ? gate_up_out(model) : model.hidden_size,
                     0,
                     0.0f};
  const char* parameter = gate_up ? "gate_up_proj" : "down_proj";
  if (!fits(pair, result.in, result.out)) {
    context.mismatch("tensors " + shapes_text(pair) + " do not fit " + parameter + " of the experts (" +
                     std::to_string(result.in) + " to " + std::to_string(result.out) + ") in either orientation");
  }
  const ModuleScale scale = module_scale(context.adapter, pattern_paths(pair.path, std::string(".") + parameter));
  const int64_t rows = pair.a->shape[0];
  if (rows != pair.b->shape[1] || rows % model.num_experts != 0) {
    context.mismatch("tensors " + shapes_text(pair) + " do not hold one rank for each of " +
                     std::to_string(model.num_experts) + " experts; expected " + std::to_string(model.num_experts) +
                     " x rank " + std::to_string(scale.rank));
  }
  context.check_rank(rows / model.num_experts, scale.rank, *pair.a);
  result.rank = scale.rank;
  result.scale = scale.scale;
  return result;
}

std::vector<WrapperPair> find_wrappers(const std::vector<AdapterPair>& pairs, const LoadContext& context) {
  std::vector<WrapperPair> wrappers;
  for (size_t i = 0; i < pairs.size(); ++i) {
    const AdapterPair& pair = pairs[i];
    const bool inner = pair.target.kind == TargetKind::kExpertsInner;
    if (!inner && pair.target.kind != TargetKind::kExpertsOuter) {
      continue;
    }
    if (context.adapter.lora_bias || pair.bias != nullptr) {
      throw Error{Status::kUnsupported, context.file + ": tensor " + quoted(*pair.a) +
                                            ": lora_bias is not defined for 3-D expert parameters"};
    }
    if (pair.a->shape.size() != 2 || pair.b->shape.size() != 2) {
      context.mismatch("tensors " + shapes_text(pair) + " must have two dimensions");
    }
    // Pairs are sorted, so that the inner one of a layer comes right before the outer one.
    const bool has_inner = !inner && i > 0 && pairs[i - 1].target.kind == TargetKind::kExpertsInner &&
                           pairs[i - 1].target.layer == pair.target.layer;
    const bool has_outer = inner && i + 1 < pairs.size() && pairs[i + 1].target.kind == TargetKind::kExpertsOuter &&
                           pairs[i + 1].target.layer == pair.target.layer;
    if (inner && !has_outer) {
      context.mismatch("tensor " + quoted(*pair.a) +
                       " is the first of two adapted expert parameters, and the second is missing");
    }
    wrappers.push_back(check_wrapper(pair, inner || outer_is_gate_up(pair, has_inner, context), context));
  }
  return wrappers;
}

// The orientation of a pair by its own sizes; nothing if both fit.
std::optional<bool> reversed_by_sizes(const WrapperPair& wrapper) {
  if (wrapper.in == wrapper.out) {
    return std::nullopt;
  }
  return wrapper.pair->a->shape[1] != wrapper.in;
}

// PEFT up to 0.19.0 took dimension 1 of a parameter as the input, whatever it means; for [E, out, in] parameters, as in
// every family but gpt-oss, that is the output. 0.19.1 corrected it. gpt-oss stores [E, in, out], which suited the old
// rule; 0.19.0 swapped it by mistake, 0.19.1 does not, both provided that transformers (5) says how it is stored.
bool reversed_by_version(const WrapperPair& wrapper, const LoadContext& context) {
  const PeftVersion& version = context.adapter.peft_version;
  const auto number = std::tuple(version.major, version.minor, version.patch);
  const auto fixed = std::tuple(0, 19, 1);
  const bool gpt_oss = context.model.family == Family::kGptOss;
  const std::string text = "tensors " + shapes_text(*wrapper.pair) + " are square, so that their orientation ";
  if (version.major == -2 || (version.dev && (number == fixed || (gpt_oss && number == std::tuple(0, 19, 0))))) {
    context.mismatch(text + "cannot be told (peft_version '" + context.adapter.peft_version_text +
                     "'); set expert_orientation to natural or reversed");
  }
  const bool reversed = gpt_oss ? number == std::tuple(0, 19, 0) : number < fixed;
  const char* doubt = gpt_oss && number >= std::tuple(0, 19, 0) ? " (transformers 4 gave the opposite)" : "";
  context.warnings.push_back(context.file + ": " + text + "is taken from peft_version (" +
                             (version.major == -1 ? "absent" : context.adapter.peft_version_text) +
                             "): " + (reversed ? "reversed" : "natural") + doubt + "; expert_orientation overrides it");
  return reversed;
}

bool decide_reversed(const std::vector<WrapperPair>& wrappers, const LoadContext& context) {
  const ExpertOrientation option = context.options.orientation;
  const WrapperPair* witness = nullptr;
  for (const WrapperPair& wrapper : wrappers) {
    const auto reversed = reversed_by_sizes(wrapper);
    if (!reversed) {
      continue;
    }
    if (option != ExpertOrientation::kAuto && *reversed != (option == ExpertOrientation::kReversed)) {
      context.mismatch("tensors " + shapes_text(*wrapper.pair) + " are " + (*reversed ? "reversed" : "natural") +
                       ", but expert_orientation says otherwise");
    }
    if (witness != nullptr && *reversed_by_sizes(*witness) != *reversed) {
      context.mismatch("tensors " + shapes_text(*witness->pair) + " and tensors " + shapes_text(*wrapper.pair) +
                       " have opposite orientations (expert_orientation)");
    }
    witness = &wrapper;
  }
  if (option != ExpertOrientation::kAuto) {
    return option == ExpertOrientation::kReversed;
  }
  return witness != nullptr ? *reversed_by_sizes(*witness) : reversed_by_version(wrappers.front(), context);
}

bool decide_grouped(const LoadContext& context) {
  if (context.options.b_layout != ExpertBLayout::kAuto) {
    return context.options.b_layout == ExpertBLayout::kGroupedByExpert;
  }
  if (context.adapter.b_layout == ExpertBLayout::kAuto && context.adapter.unsloth_origin) {
    context.warnings.push_back(context.file +
                               ": an Unsloth adapter of experts without lora_B_layout is read as rank_major; if its "
                               "effect is weak, set expert_b_layout to grouped_by_expert");
  }
  return context.adapter.b_layout == ExpertBLayout::kGroupedByExpert;
}

// Part of an adapter's output axis that one linear of the expert takes: outputs first, first + step, ...
struct OutputPart {
  ExpertModule module;
  int32_t first;
  int32_t count;
  int32_t step = 1;
};

std::vector<OutputPart> output_parts(bool gate_up, const ModelConfig& model) {
  if (!gate_up) {
    return {{ExpertModule::kDown, 0, model.hidden_size}};
  }
  const int32_t width = model.moe_intermediate_size;
  if (model.family == Family::kGptOss) {  // by turns, as in the base
    return {{ExpertModule::kGate, 0, width, 2}, {ExpertModule::kUp, 1, width, 2}};
  }
  return {{ExpertModule::kGate, 0, width}, {ExpertModule::kUp, width, width}};
}

void append_wrapper(const WrapperPair& wrapper, bool reversed, bool grouped, const LoadContext& context,
                    std::vector<AdapterRecord>& records) {
  const AdapterPair& pair = *wrapper.pair;
  const int64_t experts = context.model.num_experts;
  const int64_t rank = wrapper.rank;
  const int64_t c_in = pair.a->shape[1];
  const int64_t b_row = experts * rank;
  for (int32_t e = 0; e < context.model.num_experts; ++e) {
    for (const OutputPart& part : output_parts(wrapper.gate_up, context.model)) {
      AdapterRecord record;
      record.layer = pair.target.layer;
      record.expert = e;
      record.module = static_cast<int32_t>(part.module);
      record.rank = wrapper.rank;
      record.scale = wrapper.scale;
      record.dtype = packed_dtype(*pair.a, *pair.b, context);
      // As stored: A_e[i, c] and B_e[c, i].
      MatrixView a{pair.a, e * rank * c_in, c_in, 1, wrapper.in};
      MatrixView b{pair.b, grouped ? e * rank : e, grouped ? 1 : experts, b_row, wrapper.in};
      MatrixView& shrink = reversed ? b : a;
      MatrixView& expand = reversed ? a : b;
      expand.offset += part.first * expand.column_stride;
      expand.column_stride *= part.step;
      expand.columns = part.count;
      record.a = shrink;
      record.b = expand;
      records.push_back(record);
    }
  }
}

// A [1 or E, r or 2r, in], B [1 or E, out, r]; a leading 1 is shared by all experts.
void append_stacked(const AdapterPair& pair, const LoadContext& context, std::vector<AdapterRecord>& records) {
  const ModelConfig& model = context.model;
  const bool gate_up = pair.target.kind == TargetKind::kStackedGateUp;
  const LinearShape shape = gate_up ? LinearShape{model.hidden_size, gate_up_out(model)}
                                    : expert_shape(model, static_cast<ExpertModule>(pair.target.index));
  const int64_t experts = model.num_experts;
  const std::vector<int64_t>& a = pair.a->shape;
  const std::vector<int64_t>& b = pair.b->shape;
  const auto leads = [&](int64_t size) { return size == 1 || size == experts; };
  const bool sizes =
      a.size() == 3 && b.size() == 3 && leads(a[0]) && leads(b[0]) && a[2] == shape.in && b[1] == shape.out;
  const bool two_blocks = sizes && gate_up && a[1] == 2 * b[2];
  if (!sizes || (a[1] != b[2] && !two_blocks)) {
    context.mismatch("tensors " + shapes_text(pair) + " do not fit [" + std::to_string(experts) + ", r, " +
                     std::to_string(shape.in) + "] and [" + std::to_string(experts) + ", " + std::to_string(shape.out) +
                     ", r]");
  }
  if (pair.bias != nullptr) {
    throw Error{Status::kUnsupported, context.file + ": tensor " + quoted(*pair.bias) +
                                          ": lora_bias is not defined for 3-D expert parameters"};
  }
  const ModuleScale scale = module_scale(context.adapter, pattern_paths(pair.path, ""));
  context.check_rank(b[2], scale.rank, *pair.b);
  const int64_t rank = scale.rank;
  for (int32_t e = 0; e < model.num_experts; ++e) {
    const std::vector<OutputPart> parts =
        gate_up ? output_parts(true, model)
                : std::vector<OutputPart>{{static_cast<ExpertModule>(pair.target.index), 0, shape.out}};
    for (size_t i = 0; i < parts.size(); ++i) {
      const int64_t block = two_blocks ? static_cast<int64_t>(i) * rank * shape.in : 0;
      AdapterRecord record;
      record.layer = pair.target.layer;
      record.expert = e;
      record.module = static_cast<int32_t>(parts[i].module);
      record.rank = scale.rank;
      record.scale = scale.scale;
      record.dtype = packed_dtype(*pair.a, *pair.b, context);
      record.a = {pair.a, (a[0] == 1 ? 0 : e * a[1] * shape.in) + block, shape.in, 1, shape.in};
      record.b = {pair.b, (b[0] == 1 ? 0 : e * rank * shape.out) + parts[i].first * rank, 1, rank * parts[i].step,
                  parts[i].count};
      records.push_back(record);
    }
  }
}

}  // namespace

void append_expert_records(const std::vector<AdapterPair>& pairs, const LoadContext& context,
                           std::vector<AdapterRecord>& records) {
  const std::vector<WrapperPair> wrappers = find_wrappers(pairs, context);
  if (!wrappers.empty()) {
    const bool reversed = decide_reversed(wrappers, context);
    const bool grouped = decide_grouped(context);
    for (const WrapperPair& wrapper : wrappers) {
      append_wrapper(wrapper, reversed, grouped, context, records);
    }
  }
  for (const AdapterPair& pair : pairs) {
    if (pair.target.kind == TargetKind::kStacked || pair.target.kind == TargetKind::kStackedGateUp) {
      append_stacked(pair, context, records);
    }
  }
}

}  // namespace moelora
