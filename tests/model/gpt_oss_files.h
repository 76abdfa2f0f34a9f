// SPDX-License-Identifier: Apache-2.0
// gpt-oss tensors in both stored forms: experts of random MXFP4 of any width, and the same numbers as a bf16 re-upload
// has them, [in, out]. Written from the formats' description; shares no code with the loader.
#pragma once

#include <string>

#include "runtime/io/json.h"
#include "tests/model/weight_files.h"
#include "tests/support/mxfp4_matrix.h"
#include "tests/support/safetensors_writer.h"

namespace moelora::test {

inline std::string experts_path(int layer) {
  return "model.layers." + std::to_string(layer) + ".mlp.experts.";
}

// The reference case's tensors with experts of `width`, drawn anew; 8 experts, hidden size 64, 2 layers.
inline RawTensors draw_gpt_oss(int64_t width, uint32_t seed) {
  RawTensors tensors = read_tensors(case_model("gpt_oss_mxfp4"));
  Draw draw(seed);
  const auto put = [&](const std::string& name, int64_t rows, int64_t cols) {
    Raw blocks{"U8", {8, rows, cols / 32, 16}, ""};
    Raw scales{"U8", {8, rows, cols / 32}, ""};
    Raw bias{"BF16", {8, rows}, ""};
    for (int64_t i = 0; i < 8 * rows * cols / 2; ++i) {
      blocks.bytes += static_cast<char>(draw.below(256));
    }
    for (int64_t i = 0; i < 8 * rows * cols / 32; ++i) {
      scales.bytes += static_cast<char>(121 + draw.below(3));
    }
    bias.bytes = encode_values("BF16", draw.floats(static_cast<size_t>(8 * rows), 0.5f));
    tensors[name + "_blocks"] = blocks;
    tensors[name + "_scales"] = scales;
    tensors[name + "_bias"] = bias;
  };
  for (int layer = 0; layer < 2; ++layer) {
    put(experts_path(layer) + "gate_up_proj", 2 * width, 64);
    put(experts_path(layer) + "down_proj", 64, width);
  }
  return tensors;
}

// One number of a stored pair of blocks [E, out, in / 32, 16] and scales.
inline double mxfp4_number(const RawTensors& tensors, const std::string& name, int64_t e, int64_t n, int64_t k) {
  const Raw& blocks = tensors.at(name + "_blocks");
  const Raw& scales = tensors.at(name + "_scales");
  const int64_t row = e * blocks.shape[1] + n;
  const int64_t groups = blocks.shape[2];
  const auto byte = static_cast<unsigned char>(blocks.bytes[static_cast<size_t>(row * groups * 16 + k / 2)]);
  const auto scale = static_cast<unsigned char>(scales.bytes[static_cast<size_t>(row * groups + k / 32)]);
  return e2m1_number(k % 2 == 0 ? byte & 15 : byte >> 4) * std::exp2(scale - 127);
}

// Turns the experts of a layer into the form of bf16 re-uploads.
inline void unpack_layer(RawTensors& tensors, int layer, const std::string& dtype = "BF16") {
  for (const char* parameter : {"gate_up_proj", "down_proj"}) {
    const std::string name = experts_path(layer) + parameter;
    const int64_t out = tensors.at(name + "_blocks").shape[1];
    const int64_t in = tensors.at(name + "_blocks").shape[2] * 32;
    std::vector<float> values;
    for (int64_t e = 0; e < 8; ++e) {
      for (int64_t k = 0; k < in; ++k) {
        for (int64_t n = 0; n < out; ++n) {
          values.push_back(static_cast<float>(mxfp4_number(tensors, name, e, n, k)));
        }
      }
    }
    tensors[name] = {dtype, {8, in, out}, encode_values(dtype, values)};
    tensors.erase(name + "_blocks");
    tensors.erase(name + "_scales");
  }
}

// config.json of the reference case for experts of `width`.
inline std::string gpt_oss_config(int64_t width, bool mxfp4) {
  Json config = read_json(case_model("gpt_oss_mxfp4") + "/config.json");
  config["intermediate_size"] = width;
  if (!mxfp4) {
    config.erase("quantization_config");
  }
  return config.dump();
}

}  // namespace moelora::test
