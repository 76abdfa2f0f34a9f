// SPDX-License-Identifier: Apache-2.0
// PEFT folders of random adapters on the attention of a model.
#pragma once

#include <filesystem>
#include <string>

#include "runtime/adapter/adapter_image.h"
#include "tests/adapter/adapter_files.h"

namespace moelora::test {

// Makes DIR with a config and weights that `seed` decides; `alpha` is the config's lora_alpha.
inline std::string write_adapter_folder(const std::string& dir, const ModelConfig& model, int32_t rank, uint32_t seed,
                                        double alpha = 16.0) {
  std::filesystem::create_directories(dir);
  Draw draw(seed);
  SafetensorsWriter writer;
  const int32_t q_width = model.num_heads * model.head_dim;
  const int32_t kv_width = model.num_kv_heads * model.head_dim;
  for (int32_t layer = 0; layer < model.num_layers; ++layer) {
    const std::string attention = std::string(kLayerPrefix) + std::to_string(layer) + ".self_attn.";
    add_pair(writer, attention + "q_proj", rank, model.hidden_size, q_width, draw);
    add_pair(writer, attention + "k_proj", rank, model.hidden_size, kv_width, draw);
    add_pair(writer, attention + "v_proj", rank, model.hidden_size, kv_width, draw);
    add_pair(writer, attention + "o_proj", rank, q_width, model.hidden_size, draw);
  }
  Json config = lora_config(rank, alpha);
  config["target_modules"] = {"q_proj", "k_proj", "v_proj", "o_proj"};
  write_file(dir + "/adapter_config.json", config.dump());
  write_file(dir + "/adapter_model.safetensors", writer.text());
  return dir;
}

}  // namespace moelora::test
