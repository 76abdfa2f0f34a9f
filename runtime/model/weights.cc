// SPDX-License-Identifier: Apache-2.0
// Fills Weights from a checkpoint: each planned tensor must be there with its shape and a float dtype, and nothing
// else may be there, because a tensor that is silently left out gives plausible but wrong text. No value is read but
// what gpt-oss needs (weights_gpt_oss.cc): the pages of the files come in when a step first touches them.
#include "runtime/model/weights.h"

#include <algorithm>

#include <fmt/format.h>

#include "kernels/base/error.h"
#include "runtime/io/json.h"
#include "runtime/model/tensor_plan.h"
#include "runtime/model/weights_loader.h"

namespace moelora {
namespace {

constexpr size_t kNamesShown = 3;

// "3 tensors are missing: a, b, c" with at most kNamesShown names.
std::string name_list(const std::vector<std::string>& names, const char* what) {
  std::string text = fmt::format("{} {} {}: ", names.size(), names.size() == 1 ? "tensor is" : "tensors are", what);
  for (size_t i = 0; i < names.size() && i < kNamesShown; ++i) {
    text += (i > 0 ? ", " : "") + printable(names[i]);
  }
  return text + (names.size() > kNamesShown ? ", ..." : "");
}

uint64_t bytes_of(const Weight& weight) {
  if (weight.empty()) {
    return 0;
  }
  return static_cast<uint64_t>(weight.rows) * static_cast<uint64_t>(weight.cols) * dtype_bytes(weight.dtype);
}

// Bytes of one expert's matrix and bias.
uint64_t bytes_of(const ExpertWeights& weights) {
  if (weights.data == nullptr) {
    return 0;
  }
  const uint64_t bias = weights.bias == nullptr ? 0 : static_cast<uint64_t>(weights.rows) * sizeof(float);
  return expert_bytes(weights.format != ExpertFormat::kRows, weights.dtype, weights.rows, weights.cols) + bias;
}

uint64_t bytes_without_experts(const LayerWeights& layer) {
  uint64_t bytes = layer.sink_values.size() * sizeof(float);
  for (const Weight* weight : {&layer.input_norm,  &layer.q,         &layer.k,           &layer.v,
                               &layer.o,           &layer.q_bias,    &layer.k_bias,      &layer.v_bias,
                               &layer.o_bias,      &layer.q_norm,    &layer.k_norm,      &layer.post_norm,
                               &layer.gate,        &layer.up,        &layer.down,        &layer.gate_bias,
                               &layer.up_bias,     &layer.down_bias, &layer.router,      &layer.router_bias,
                               &layer.shared_gate, &layer.shared_up, &layer.shared_down, &layer.shared_expert_gate}) {
    bytes += bytes_of(*weight);
  }
  return bytes;
}

}  // namespace

void WeightsLoader::load(Weights& weights) {
  if (config_.family == Family::kGptOss) {
    refuse_repacked();
  }
  for (const PlannedTensor& planned : plan_tensors(config_, weights)) {
    single(planned);
  }
  for (int32_t i = 0; i < config_.num_layers; ++i) {
    if (config_.layer_is_moe[static_cast<size_t>(i)] != 0) {
      LayerWeights& layer = weights.layers[static_cast<size_t>(i)];
      config_.family == Family::kGptOss ? gpt_oss_experts(i, layer) : experts(i, layer);
    }
  }
  if (!missing_.empty()) {
    throw Error(Status::kCorrupt, fmt::format("{}: {}", dir_, name_list(missing_, "missing")));
  }
  refuse_unexpected();
  run_tasks();  // only now: it may take a while
  for (LayerWeights& layer : weights.layers) {
    convert_vectors(layer);
  }
  if (config_.tie_embeddings) {
    weights.lm_head = weights.embedding;
  }
}

const StoredTensor* WeightsLoader::take(const std::string& name, const std::vector<int64_t>& shape, Dtype* dtype) {
  const StoredTensor* stored = checkpoint_.find(name);
  if (stored == nullptr) {
    missing_.push_back(name);
    return nullptr;
  }
  if (stored->dtype == "F32") {
    *dtype = Dtype::kF32;
  } else if (stored->dtype == "F16") {
    *dtype = Dtype::kF16;
  } else if (stored->dtype == "BF16") {
    *dtype = Dtype::kBf16;
  } else {
    throw Error(Status::kUnsupported, fmt::format("{}: tensor '{}' has dtype {}; supported: F32, F16, BF16", dir_, name,
                                                  printable(stored->dtype)));
  }
  check_shape(*stored, shape);
  use(*stored);
  return stored;
}

void WeightsLoader::check_shape(const StoredTensor& stored, const std::vector<int64_t>& shape) const {
  if (stored.shape != shape) {
    StoredTensor expected;
    expected.shape = shape;
    throw Error(Status::kCorrupt, fmt::format("{}: tensor '{}' has shape {}, config.json implies {}", dir_, stored.name,
                                              stored.shape_text(), expected.shape_text()));
  }
}

void WeightsLoader::use(const StoredTensor& stored) {
  used_.insert(stored.name);
  bytes_ += stored.bytes;
}

void WeightsLoader::refuse_both(const std::string& one, const std::string& other) const {
  throw Error(Status::kCorrupt, fmt::format("{}: holds '{}' and '{}': one of them must go", dir_, one, other));
}

void WeightsLoader::single(const PlannedTensor& planned) {
  const std::string* name = nullptr;
  for (const std::string& candidate : planned.names) {
    if (checkpoint_.find(candidate) == nullptr) {
      continue;
    }
    if (name != nullptr) {
      refuse_both(*name, candidate);
    }
    name = &candidate;
  }
  if (name == nullptr) {
    name = &planned.names.front();
  }
  std::vector<int64_t> shape = {planned.rows, planned.cols};
  if (is_vector(planned.kind)) {
    shape = {planned.cols};
  }
  Dtype dtype = Dtype::kBf16;
  const StoredTensor* stored = take(*name, shape, &dtype);
  if (stored != nullptr) {
    *planned.weight = {stored->data, dtype, planned.rows, planned.cols};
  }
}

void WeightsLoader::experts(int32_t layer, LayerWeights& weights) {
  const std::vector<PlannedExperts> planned = plan_experts(config_, weights);
  const std::string gate_up = fused_gate_up_name(layer);
  const std::string down = fused_down_name(layer);
  const bool has_gate_up = checkpoint_.find(gate_up) != nullptr;
  if (!has_gate_up && checkpoint_.find(down) == nullptr) {
    for (const PlannedExperts& projection : planned) {
      per_expert(layer, projection);
    }
    return;
  }
  for (int32_t e = 0; e < config_.num_experts; ++e) {
    for (const PlannedExperts& projection : planned) {
      const std::string name = expert_tensor_name(config_, layer, e, projection.projection);
      if (checkpoint_.find(name) != nullptr) {
        refuse_both(has_gate_up ? gate_up : down, name);
      }
    }
  }
  const int64_t count = config_.num_experts;
  const int64_t inner = config_.moe_intermediate_size;
  const int64_t width = config_.hidden_size;
  const size_t half = static_cast<size_t>(inner * width);  // elements of gate, then of up, in each expert
  fused(gate_up, {count, 2 * inner, width}, 2 * half, 0, planned[0]);
  fused(gate_up, {count, 2 * inner, width}, 2 * half, half, planned[1]);
  fused(down, {count, width, inner}, half, 0, planned[2]);
}

void WeightsLoader::per_expert(int32_t layer, const PlannedExperts& planned) {
  std::vector<const void*>& data = *planned.data;
  data.assign(static_cast<size_t>(config_.num_experts), nullptr);
  Dtype dtype = Dtype::kBf16;
  for (int32_t e = 0; e < config_.num_experts; ++e) {
    const std::string name = expert_tensor_name(config_, layer, e, planned.projection);
    Dtype own = Dtype::kBf16;
    const StoredTensor* stored = take(name, {planned.rows, planned.cols}, &own);
    if (stored == nullptr) {
      continue;
    }
    if (e > 0 && own != dtype && data[0] != nullptr) {
      throw Error(Status::kUnsupported,
                  fmt::format("{}: tensor '{}' is {}, but '{}' is {}: the experts of one projection must share a "
                              "dtype",
                              dir_, name, dtype_name(own), expert_tensor_name(config_, layer, 0, planned.projection),
                              dtype_name(dtype)));
    }
    if (e == 0) {
      dtype = own;
    }
    data[static_cast<size_t>(e)] = stored->data;
  }
  *planned.weights = {data.data(), dtype, planned.rows, planned.cols};
}

void WeightsLoader::fused(const std::string& name, const std::vector<int64_t>& shape, size_t stride, size_t offset,
                          const PlannedExperts& planned) {
  const bool first_use = used_.count(name) == 0;
  Dtype dtype = Dtype::kBf16;
  if (!first_use) {
    bytes_ -= checkpoint_.find(name)->bytes;  // gate and up share one tensor: count it once
  }
  const StoredTensor* stored = take(name, shape, &dtype);
  if (stored == nullptr) {
    return;
  }
  std::vector<const void*>& data = *planned.data;
  data.resize(static_cast<size_t>(config_.num_experts));
  for (size_t e = 0; e < data.size(); ++e) {
    data[e] = stored->data + (e * stride + offset) * dtype_bytes(dtype);
  }
  *planned.weights = {data.data(), dtype, planned.rows, planned.cols};
}

bool WeightsLoader::may_be_ignored(const std::string& name) const {
  static const std::string kInvFreq = ".rotary_emb.inv_freq";  // old Llama and Mixtral files store this constant
  if (name.size() > kInvFreq.size() && name.compare(name.size() - kInvFreq.size(), kInvFreq.size(), kInvFreq) == 0) {
    return true;
  }
  return config_.tie_embeddings && name == "lm_head.weight";
}

void WeightsLoader::refuse_unexpected() const {
  std::vector<std::string> unexpected;
  for (const auto& [name, stored] : checkpoint_.tensors()) {
    if (used_.count(name) == 0 && !may_be_ignored(name)) {
      unexpected.push_back(name);
    }
  }
  if (unexpected.empty()) {
    return;
  }
  throw Error(Status::kUnsupported, fmt::format("{}: {}", dir_, name_list(unexpected, "not part of this model")));
}

Weights::Weights() : storage_(std::make_unique<Storage>()) {}
Weights::~Weights() = default;

std::unique_ptr<Weights> Weights::load(const std::string& dir, const ModelConfig& config) {
  std::unique_ptr<Weights> weights(new Weights);
  weights->storage_->checkpoint = Checkpoint::open(dir);
  weights->layers.resize(static_cast<size_t>(config.num_layers));
  WeightsLoader loader(dir, config, *weights->storage_);
  loader.load(*weights);
  weights->bytes_ = loader.bytes();
  return weights;
}

std::vector<Weights::Area> Weights::areas() const {
  std::vector<Area> areas;
  if (storage_->device.bytes() > 0) {
    areas.push_back({storage_->device.data(), storage_->device.bytes()});
  }
  for (const auto& memory : storage_->memory) {
    areas.push_back({memory->data(), memory->bytes()});
  }
  if (storage_->checkpoint != nullptr) {
    for (const auto& file : storage_->checkpoint->files()) {
      areas.push_back({file->data(), file->bytes()});
    }
  }
  std::sort(areas.begin(), areas.end(), [](const Area& a, const Area& b) { return a.bytes > b.bytes; });
  return areas;
}

double weight_bytes_of_step(const ModelConfig& config, const Weights& weights, double active) {
  double bytes = static_cast<double>(bytes_of(weights.final_norm) + bytes_of(weights.lm_head));
  const double experts = std::clamp(active, 0.0, static_cast<double>(config.num_experts));
  for (const LayerWeights& layer : weights.layers) {
    bytes += static_cast<double>(bytes_without_experts(layer));
    bytes += experts *
             static_cast<double>(bytes_of(layer.expert_gate) + bytes_of(layer.expert_up) + bytes_of(layer.expert_down));
  }
  return bytes;
}

}  // namespace moelora
