// SPDX-License-Identifier: Apache-2.0
// config.json as parse_model_config's steps read it. Private to config*.cc.
#pragma once

#include <string>

#include <fmt/format.h>

#include "kernels/base/error.h"
#include "runtime/io/json.h"
#include "runtime/model/config.h"

namespace moelora {

constexpr int64_t kWidthMax = int64_t{1} << 24;  // any matrix dimension, vocabulary included
constexpr int64_t kLayersMax = 4096;
constexpr int64_t kExpertsMax = 4096;
constexpr int64_t kPositionsMax = int64_t{1} << 30;

// A JSON file with its name, for messages.
struct ConfigSource {
  const Json& json;
  const std::string& file;

  [[nodiscard]] bool has(const char* key) const {
    const auto found = json.find(key);
    return found != json.end() && !found->is_null();
  }
  [[noreturn]] void corrupt(const std::string& what) const {
    throw Error(Status::kCorrupt, fmt::format("{}: {}", file, what));
  }
  [[noreturn]] void unsupported(const std::string& what) const {
    throw Error(Status::kUnsupported, fmt::format("{}: {}", file, what));
  }
  [[nodiscard]] int32_t checked(const char* key, int64_t value, int64_t least, int64_t most) const {
    if (value < least || value > most) {
      corrupt(fmt::format("key '{}' is {}, must lie in {} to {}", key, value, least, most));
    }
    return static_cast<int32_t>(value);
  }
  [[nodiscard]] int32_t size(const char* key, int64_t most = kWidthMax) const {
    return checked(key, json_int(json, key, file), 1, most);
  }
  [[nodiscard]] bool flag(const char* key, bool fallback) const { return json_bool_or(json, key, fallback, file); }
};

// Heads, biases, QK norm; then windows of the layers; then RoPE, which may differ by window. Sizes and number of layers
// are known before.
void parse_attention(const ConfigSource& source, ModelConfig& config);
void parse_windows(const ConfigSource& source, ModelConfig& config);
void parse_positions(const ConfigSource& source, ModelConfig& config);

}  // namespace moelora
