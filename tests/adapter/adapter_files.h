// SPDX-License-Identifier: Apache-2.0
// Small models and adapters for the tests of this folder.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/adapter/adapter_image.h"
#include "runtime/io/json.h"
#include "tests/support/draw.h"
#include "tests/support/safetensors_writer.h"

namespace moelora::test {

constexpr const char* kLayerPrefix = "base_model.model.model.layers.";

inline ModelConfig tiny_moe(Family family = Family::kQwen3Moe, int32_t hidden = 24, int32_t intermediate = 20) {
  ModelConfig config;
  config.family = family;
  config.hidden_size = hidden;
  config.num_layers = 2;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 8;
  config.vocab_size = 50;
  config.intermediate_size = 28;
  config.num_experts = 4;
  config.top_k = 2;
  config.moe_intermediate_size = intermediate;
  config.shared_intermediate_size = family == Family::kQwen2Moe ? 36 : 0;
  config.layer_is_moe = {1, 1};
  return config;
}

inline ModelConfig tiny_dense() {
  ModelConfig config = tiny_moe(Family::kLlama);
  config.num_experts = config.top_k = config.moe_intermediate_size = 0;
  config.layer_is_moe = {0, 0};
  return config;
}

inline Json lora_config(int32_t rank = 3, double alpha = 6.0) {
  Json config;
  config["peft_type"] = "LORA";
  config["task_type"] = "CAUSAL_LM";
  config["r"] = rank;
  config["lora_alpha"] = alpha;
  return config;
}

inline std::shared_ptr<const AdapterImage> load(const Json& config, const SafetensorsWriter& writer,
                                                const ModelConfig& model, const AdapterLoadOptions& options = {}) {
  const std::string text = writer.text();
  return load_adapter_memory(config.dump(), reinterpret_cast<const std::byte*>(text.data()), text.size(), model,
                             options);
}

// Adds NAME.lora_A.weight [rank, in] and NAME.lora_B.weight [out, rank] of random values.
inline void add_pair(SafetensorsWriter& writer, const std::string& name, int32_t rank, int32_t in, int32_t out,
                     Draw& draw, const std::string& dtype = "F32") {
  writer.add(name + ".lora_A.weight", {rank, in}, draw.floats(static_cast<size_t>(rank * in)), dtype);
  writer.add(name + ".lora_B.weight", {out, rank}, draw.floats(static_cast<size_t>(rank * out)), dtype);
}

}  // namespace moelora::test
