// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding: reads its parameters from either spelling of config.json and computes the inverse
// frequencies with their scaling (default, linear, yarn, llama3). Every other rope_type, and every parameter that
// is not understood, is refused by name: falling back to the default gives fluent but wrong text. Called by
// parse_model_config only.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/io/json.h"

namespace moelora {

struct RopeParameters {
  std::string type = "default";
  double theta = 10000.0;
  double factor = 1.0;
  double original_max_position = 0.0;
  // llama3
  double low_freq_factor = 1.0;
  double high_freq_factor = 1.0;
  // yarn
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  bool truncate = true;
  double attention_factor = 0.0;  // 0 = from factor, mscale and mscale_all_dim
  double mscale = 0.0;
  double mscale_all_dim = 0.0;
};

struct RopeTable {
  std::vector<double> inv_freq;   // [head_dim / 2]
  double attention_factor = 1.0;  // on cos and sin
};

// `config` is the whole config.json; `layer_type` selects among parameters nested by layer type ("full_attention",
// "sliding_attention"). Throws Error{kCorrupt} or {kUnsupported} naming `file` and key.
RopeParameters parse_rope(const Json& config, int64_t max_position, double default_theta, const std::string& layer_type,
                          const std::string& file);

RopeTable rope_table(const RopeParameters& parameters, int32_t head_dim);

}  // namespace moelora
