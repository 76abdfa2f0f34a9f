// SPDX-License-Identifier: Apache-2.0
// The tensors that a model of a given configuration has: name, shape, and the view in Weights each belongs to. One
// list serves loading, random weights and the estimate of their size, so the three cannot disagree. Names are those
// of the Hugging Face layout of each family (formats.md A2-A6, A10).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/model/weights.h"

namespace moelora {

enum class TensorKind : uint8_t { kMatrix, kRouter, kNorm, kBias, kSinks, kExpertBias };
// Stored as [cols]; the others as [rows, cols].
constexpr bool is_vector(TensorKind kind) {
  return kind == TensorKind::kNorm || kind == TensorKind::kBias || kind == TensorKind::kSinks;
}

struct PlannedTensor {
  std::vector<std::string> names;  // the first one found is used; more than one found is an error
  TensorKind kind;
  int32_t rows;  // 1 for norms and plain biases, which are stored as [cols]
  int32_t cols;
  Weight* weight;  // where the view goes
};

// One projection of a layer's routed experts.
struct PlannedExperts {
  const char* projection;  // as in per-expert names: "gate_proj", or Mixtral's "w1"
  int32_t rows;
  int32_t cols;
  std::vector<const void*>* data;
  std::vector<const uint8_t*>* scales;
  ExpertWeights* weights;
};

// All but the routed experts. `weights.layers` must have num_layers entries; views point into it.
std::vector<PlannedTensor> plan_tensors(const ModelConfig& config, Weights& weights);
// Gate, up, down of a MoE layer, in this order.
std::vector<PlannedExperts> plan_experts(const ModelConfig& config, LayerWeights& layer);

std::string expert_tensor_name(const ModelConfig& config, int32_t layer, int32_t expert, const char* projection);
// The 3-D tensors that transformers v5 may write instead: [E, 2I, H] and [E, H, I]. In gpt-oss the only form, as
// [E, H, 2I] and [E, I, H]; its MXFP4 form adds "_blocks" and "_scales".
std::string fused_gate_up_name(int32_t layer);
std::string fused_down_name(int32_t layer);

// Stored bytes of one expert's projection.
inline uint64_t expert_bytes(bool mxfp4, Dtype dtype, int32_t rows, int32_t cols) {
  const uint64_t elements = static_cast<uint64_t>(rows) * static_cast<uint64_t>(cols);
  return mxfp4 ? elements / 2 + elements / 32 : elements * dtype_bytes(dtype);
}

}  // namespace moelora
