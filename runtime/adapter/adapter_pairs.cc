// SPDX-License-Identifier: Apache-2.0
// See adapter_pairs.h.
#include "runtime/adapter/adapter_pairs.h"

#include <map>

#include "kernels/base/error.h"
#include "runtime/adapter/adapter_tiles.h"
#include "runtime/io/json.h"

namespace moelora {
namespace {

// Tensors that are not used: the first is named, the others are counted.
struct Refused {
  const StoredTensor* first = nullptr;
  std::string reason;
  int32_t further = 0;

  void add(const StoredTensor& tensor, const std::string& why) {
    if (first == nullptr) {
      first = &tensor;
      reason = why;
    } else {
      ++further;
    }
  }
  [[nodiscard]] std::string text(const std::string& file) const {
    std::string message = file + ": tensor " + quoted(*first) + " " + first->shape_text() + ": " + reason;
    if (further > 0) {
      message += "; and " + std::to_string(further) + (further == 1 ? " further tensor" : " further tensors");
    }
    return message;
  }
};

const StoredTensor*& part_of(AdapterPair& pair, TensorPart part) {
  return part == TensorPart::kA ? pair.a : part == TensorPart::kB ? pair.b : pair.bias;
}

void check_stored(const StoredTensor& tensor, const LoadContext& context) {
  Dtype dtype = Dtype::kF32;
  if (!parse_dtype(tensor.dtype, dtype)) {
    throw Error{Status::kUnsupported, context.file + ": tensor " + quoted(tensor) + " has dtype " + tensor.dtype +
                                          "; adapters are F32, F16 or BF16"};
  }
}

void check_complete(const AdapterPair& pair, const LoadContext& context) {
  if (pair.a == nullptr || pair.b == nullptr) {
    const StoredTensor* there = pair.a != nullptr ? pair.a : pair.b != nullptr ? pair.b : pair.bias;
    context.mismatch("tensor " + quoted(*there) + " has no " + (pair.a == nullptr ? "lora_A" : "lora_B") +
                     " beside it");
  }
}

}  // namespace

void LoadContext::mismatch(const std::string& message) const {
  throw Error{Status::kAdapterMismatch, file + ": " + message};
}

void LoadContext::check_rank(int64_t rank, int32_t expected, const StoredTensor& tensor) const {
  if (rank > options.max_rank) {
    mismatch("tensor " + quoted(tensor) + " has rank " + std::to_string(rank) + "; the maximum is " +
             std::to_string(options.max_rank) + " (option max_lora_rank)");
  }
  if (rank != expected) {
    mismatch("tensor " + quoted(tensor) + " " + tensor.shape_text() + " has rank " + std::to_string(rank) +
             ", but adapter_config.json gives rank " + std::to_string(expected) + " to this module");
  }
}

LinearShape dense_shape(const ModelConfig& config, LoraModule module) {
  const int32_t hidden = config.hidden_size;
  const int32_t heads = config.num_heads * config.head_dim;
  const int32_t kv_heads = config.num_kv_heads * config.head_dim;
  switch (module) {
    case LoraModule::kQ:
      return {hidden, heads};
    case LoraModule::kK:
    case LoraModule::kV:
      return {hidden, kv_heads};
    case LoraModule::kO:
      return {heads, hidden};
    case LoraModule::kRouter:
      return {hidden, config.num_experts};
    case LoraModule::kGate:
    case LoraModule::kUp:
      return {hidden, config.intermediate_size};
    case LoraModule::kDown:
      return {config.intermediate_size, hidden};
    case LoraModule::kSharedGate:
    case LoraModule::kSharedUp:
      return {hidden, config.shared_intermediate_size};
    case LoraModule::kSharedDown:
      return {config.shared_intermediate_size, hidden};
    case LoraModule::kSharedExpertGate:
      return {hidden, 1};
    case LoraModule::kNone:
      break;
  }
  MOELORA_ASSERT(false);
}

LinearShape expert_shape(const ModelConfig& config, ExpertModule module) {
  return module == ExpertModule::kDown ? LinearShape{config.moe_intermediate_size, config.hidden_size}
                                       : LinearShape{config.hidden_size, config.moe_intermediate_size};
}

AdapterPairs collect_pairs(const SafetensorsFile& file, const LoadContext& context) {
  std::map<AdapterTarget, AdapterPair> pairs;
  Refused unsupported;
  Refused unknown;
  AdapterPairs result;
  for (const StoredTensor& tensor : file.tensors()) {
    ++result.num_tensors;
    const NameMatch match = match_tensor_name(tensor.name, context.model);
    if (match.verdict == NameVerdict::kUnsupported) {
      unsupported.add(tensor, match.reason);
    } else if (match.verdict == NameVerdict::kUnknown) {
      unknown.add(tensor, match.reason);
    } else if (match.verdict == NameVerdict::kTarget) {
      check_stored(tensor, context);
      AdapterPair& pair = pairs[match.target];
      const StoredTensor*& slot = part_of(pair, match.part);
      if (slot != nullptr) {
        context.mismatch("tensors " + quoted(*slot) + " and " + quoted(tensor) +
                         " are the same after normalising names");
      }
      slot = &tensor;
      pair.target = match.target;
      if (match.part == TensorPart::kA) {
        pair.path = match.path;
      }
    }
  }
  if (unsupported.first != nullptr) {
    throw Error{Status::kUnsupported, unsupported.text(context.file)};
  }
  if (unknown.first != nullptr && (!context.options.lenient || pairs.empty())) {
    throw Error{Status::kAdapterMismatch, unknown.text(context.file)};
  }
  if (pairs.empty()) {
    context.mismatch(result.num_tensors == 0 ? "the file holds no tensors" : "no tensor adapts a module of the model");
  }
  result.num_unmatched = unknown.first == nullptr ? 0 : unknown.further + 1;
  for (auto& [target, pair] : pairs) {
    check_complete(pair, context);
    result.pairs.push_back(std::move(pair));
  }
  return result;
}

std::vector<std::string> pattern_paths(const std::string& path, const std::string& suffix) {
  std::vector<std::string> paths{path + suffix};
  // The experts of Mixtral are called block_sparse_moe in files and mlp by newer versions of transformers.
  for (const auto& [from, to] : {std::pair<std::string, std::string>{".block_sparse_moe.", ".mlp."},
                                 std::pair<std::string, std::string>{".mlp.", ".block_sparse_moe."}}) {
    const size_t at = path.find(from);
    if (at != std::string::npos) {
      paths.push_back(path.substr(0, at) + to + path.substr(at + from.size()) + suffix);
      break;
    }
  }
  return paths;
}

Dtype packed_dtype(const StoredTensor& a, const StoredTensor& b, const LoadContext& context) {
  const bool bf16 = (a.dtype == "BF16" && b.dtype == "BF16") || context.options.compute == Compute::kBf16;
  return bf16 ? Dtype::kBf16 : Dtype::kF32;
}

void append_linear_record(const AdapterPair& pair, const LoadContext& context, std::vector<AdapterRecord>& records) {
  const bool dense = pair.target.kind == TargetKind::kDense;
  const LinearShape shape = dense ? dense_shape(context.model, static_cast<LoraModule>(pair.target.index))
                                  : expert_shape(context.model, static_cast<ExpertModule>(pair.target.index));
  const auto require = [&](const StoredTensor& tensor, bool good, const std::string& expected) {
    if (!good) {
      context.mismatch("tensor " + quoted(tensor) + " has shape " + tensor.shape_text() + ", expected " + expected +
                       " (rank of the config: " + std::to_string(context.adapter.rank) + ")");
    }
  };
  require(*pair.a, pair.a->shape.size() == 2 && pair.a->shape[1] == shape.in, "[r, " + std::to_string(shape.in) + "]");
  require(*pair.b, pair.b->shape.size() == 2 && pair.b->shape[0] == shape.out,
          "[" + std::to_string(shape.out) + ", r]");
  const int64_t rank = pair.a->shape[0];
  require(*pair.b, pair.b->shape[1] == rank, "[" + std::to_string(shape.out) + ", " + std::to_string(rank) + "]");
  if (pair.bias != nullptr) {
    require(*pair.bias, pair.bias->shape == std::vector<int64_t>{shape.out}, "[" + std::to_string(shape.out) + "]");
  }
  std::vector<std::string> paths = pattern_paths(pair.path, "");
  if (dense && pair.target.index == static_cast<int32_t>(LoraModule::kRouter)) {
    paths.push_back(pair.path + ".weight");  // adapted as a parameter, the path ends in the parameter's name
  }
  const ModuleScale scale = module_scale(context.adapter, paths);
  context.check_rank(rank, scale.rank, *pair.a);
  AdapterRecord record;
  record.layer = pair.target.layer;
  record.expert = pair.target.expert;
  record.module = pair.target.index;
  record.rank = scale.rank;
  record.scale = scale.scale;
  record.dtype = packed_dtype(*pair.a, *pair.b, context);
  record.a = {pair.a, 0, shape.in, 1, shape.in};
  record.b = {pair.b, 0, 1, rank, shape.out};
  record.bias = pair.bias;
  records.push_back(record);
}

}  // namespace moelora
