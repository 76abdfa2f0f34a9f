// SPDX-License-Identifier: Apache-2.0
// Double precision throughout; the caller rounds to float once. Parameters come from `rope_parameters` (v5) or
// from `rope_theta` and `rope_scaling` (older); where both give a value the newer place wins.
#include "runtime/model/rope.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include <fmt/format.h>

#include "kernels/base/error.h"

namespace moelora {
namespace {

constexpr double kPi = 3.14159265358979323846;

const Json* object_or_null(const Json& config, const char* key, const std::string& file) {
  const auto found = config.find(key);
  if (found == config.end() || found->is_null()) {
    return nullptr;
  }
  if (!found->is_object()) {
    throw Error(Status::kCorrupt, fmt::format("{}: key '{}' must be an object or null", file, key));
  }
  return &*found;
}

// rope_parameters may be nested one level by layer type.
const Json* flat_parameters(const Json* parameters, const std::string& layer_type, const std::string& file) {
  if (parameters == nullptr || parameters->empty()) {
    return nullptr;
  }
  const bool nested = std::all_of(parameters->begin(), parameters->end(), [](const Json& v) { return v.is_object(); });
  if (!nested) {
    return parameters;
  }
  const auto own = parameters->find(layer_type);
  if (own == parameters->end()) {
    throw Error(Status::kCorrupt, fmt::format("{}: rope_parameters has no entry '{}'", file, layer_type));
  }
  return &*own;
}

void refuse_unknown_keys(const Json& parameters, const char* place, const std::string& file) {
  static const std::initializer_list<const char*> known = {"rope_type",
                                                           "type",
                                                           "rope_theta",
                                                           "factor",
                                                           "original_max_position_embeddings",
                                                           "low_freq_factor",
                                                           "high_freq_factor",
                                                           "beta_fast",
                                                           "beta_slow",
                                                           "truncate",
                                                           "attention_factor",
                                                           "mscale",
                                                           "mscale_all_dim",
                                                           "partial_rotary_factor",
                                                           "finetuned"};
  for (const auto& item : parameters.items()) {
    const bool is_known = std::any_of(known.begin(), known.end(), [&](const char* key) { return item.key() == key; });
    if (!is_known && !item.value().is_null()) {
      throw Error(Status::kUnsupported,
                  fmt::format("{}: {} key '{}' is not supported", file, place, printable(item.key())));
    }
  }
}

std::string parse_type(const Json& scaling, const char* place, bool type_required, const std::string& file) {
  const std::string modern = json_string_or(scaling, "rope_type", "", file);
  const std::string older = json_string_or(scaling, "type", "", file);
  if (!modern.empty() && !older.empty() && modern != older) {
    throw Error(Status::kCorrupt, fmt::format("{}: {} has rope_type '{}' and type '{}'", file, place, printable(modern),
                                              printable(older)));
  }
  const std::string type = modern.empty() ? older : modern;
  if (!type.empty()) {
    return type;
  }
  if (type_required) {
    throw Error(Status::kCorrupt, fmt::format("{}: {} has no 'rope_type'", file, place));
  }
  return "default";
}

// A number of a scaling object that must be at least `least`.
double number_from(const Json& scaling, const char* key, double least, const std::string& file) {
  const double value = json_number(scaling, key, file);
  if (!(value >= least)) {
    throw Error(Status::kCorrupt, fmt::format("{}: key '{}' is {}, must be at least {}", file, key, value, least));
  }
  return value;
}

void check_partial_rotary(const Json& object, const std::string& file) {
  const double part = json_number_or(object, "partial_rotary_factor", 1.0, file);
  if (part != 1.0) {
    throw Error(Status::kUnsupported, fmt::format("{}: partial_rotary_factor {} is not supported", file, part));
  }
}

void parse_scaling(const Json& scaling, int64_t max_position, const std::string& file, RopeParameters& rope) {
  if (rope.type == "default") {
    return;
  }
  const bool has_factor = scaling.contains("factor") && !scaling.at("factor").is_null();
  if (rope.type == "yarn" && !has_factor) {
    rope.factor = std::max(static_cast<double>(max_position) / rope.original_max_position, 1.0);
  } else {
    rope.factor = number_from(scaling, "factor", 1.0, file);
  }
  if (rope.type == "llama3") {
    rope.low_freq_factor = number_from(scaling, "low_freq_factor", 1e-6, file);
    rope.high_freq_factor = number_from(scaling, "high_freq_factor", rope.low_freq_factor, file);
  }
  if (rope.type != "yarn") {
    return;
  }
  rope.beta_fast = json_number_or(scaling, "beta_fast", 32.0, file);
  rope.beta_slow = json_number_or(scaling, "beta_slow", 1.0, file);
  if (!(rope.beta_slow > 0) || !(rope.beta_fast >= rope.beta_slow)) {
    throw Error(Status::kCorrupt, fmt::format("{}: beta_fast {} must be at least beta_slow {}, both above 0", file,
                                              rope.beta_fast, rope.beta_slow));
  }
  rope.truncate = json_bool_or(scaling, "truncate", true, file);
  rope.mscale = json_number_or(scaling, "mscale", 0.0, file);
  rope.mscale_all_dim = json_number_or(scaling, "mscale_all_dim", 0.0, file);
  if (scaling.contains("attention_factor") && !scaling.at("attention_factor").is_null()) {
    rope.attention_factor = number_from(scaling, "attention_factor", 1e-6, file);
  }
}

// One frequency under llama3 scaling: long waves are divided by the factor, short ones kept, those between blended.
double llama3_frequency(const RopeParameters& rope, double inv) {
  const double wavelength = 2.0 * kPi / inv;
  if (wavelength < rope.original_max_position / rope.high_freq_factor) {
    return inv;
  }
  if (wavelength > rope.original_max_position / rope.low_freq_factor) {
    return inv / rope.factor;
  }
  if (rope.high_freq_factor == rope.low_freq_factor) {
    return inv;  // the band is one point: nothing to blend
  }
  const double blend =
      (rope.original_max_position / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
  return (1.0 - blend) * inv / rope.factor + blend * inv;
}

double yarn_mscale(double factor, double scale) {
  return factor <= 1.0 ? 1.0 : 0.1 * scale * std::log(factor) + 1.0;
}

void apply_yarn(const RopeParameters& rope, int32_t head_dim, RopeTable& table) {
  const auto correction = [&](double beta) {
    return head_dim * std::log(rope.original_max_position / (2.0 * kPi * beta)) / (2.0 * std::log(rope.theta));
  };
  double low = correction(rope.beta_fast);
  double high = correction(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, head_dim - 1.0);
  if (low == high) {
    high += 0.001;
  }
  for (size_t i = 0; i < table.inv_freq.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    table.inv_freq[i] = table.inv_freq[i] * (1.0 - ramp) + table.inv_freq[i] / rope.factor * ramp;
  }
  if (rope.attention_factor > 0.0) {
    table.attention_factor = rope.attention_factor;
  } else if (rope.mscale != 0.0 && rope.mscale_all_dim != 0.0) {
    table.attention_factor = yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim);
  } else {
    table.attention_factor = yarn_mscale(rope.factor, 1.0);
  }
}

}  // namespace

RopeParameters parse_rope(const Json& config, int64_t max_position, double default_theta, const std::string& layer_type,
                          const std::string& file) {
  const Json* modern = flat_parameters(object_or_null(config, "rope_parameters", file), layer_type, file);
  const Json* older = object_or_null(config, "rope_scaling", file);
  RopeParameters rope;
  rope.theta = json_number_or(config, "rope_theta", default_theta, file);
  check_partial_rotary(config, file);
  const Json* scaling = nullptr;
  if (modern != nullptr) {
    refuse_unknown_keys(*modern, "rope_parameters", file);
    check_partial_rotary(*modern, file);
    rope.theta = json_number_or(*modern, "rope_theta", rope.theta, file);
    rope.type = parse_type(*modern, "rope_parameters", false, file);
    scaling = modern;
  }
  // A rope_parameters that holds the base alone leaves the scaling to the older key.
  const bool modern_has_type = modern != nullptr && (modern->contains("rope_type") || modern->contains("type"));
  if (!modern_has_type && older != nullptr) {
    rope.type = parse_type(*older, "rope_scaling", true, file);
    scaling = older;
  }
  if (rope.type != "default" && rope.type != "linear" && rope.type != "yarn" && rope.type != "llama3") {
    throw Error(Status::kUnsupported,
                fmt::format("{}: rope_type '{}' is not supported; supported: default, linear, yarn, llama3", file,
                            printable(rope.type)));
  }
  if (scaling == older && older != nullptr) {
    refuse_unknown_keys(*older, "rope_scaling", file);
    check_partial_rotary(*older, file);
  }
  if (!(rope.theta > 1.0)) {
    throw Error(Status::kCorrupt, fmt::format("{}: key 'rope_theta' is {}, must be above 1", file, rope.theta));
  }
  int64_t original =
      scaling == nullptr ? max_position : json_int_or(*scaling, "original_max_position_embeddings", max_position, file);
  original = json_int_or(config, "original_max_position_embeddings", original, file);
  if (original < 1) {
    throw Error(Status::kCorrupt,
                fmt::format("{}: key 'original_max_position_embeddings' is {}, must be at least 1", file, original));
  }
  rope.original_max_position = static_cast<double>(original);
  if (scaling != nullptr) {
    parse_scaling(*scaling, max_position, file, rope);
  }
  return rope;
}

RopeTable rope_table(const RopeParameters& rope, int32_t head_dim) {
  RopeTable table;
  table.inv_freq.resize(static_cast<size_t>(head_dim / 2));
  for (size_t i = 0; i < table.inv_freq.size(); ++i) {
    double inv = std::pow(rope.theta, -2.0 * static_cast<double>(i) / head_dim);
    if (rope.type == "linear") {
      inv /= rope.factor;
    }
    if (rope.type == "llama3") {
      inv = llama3_frequency(rope, inv);
    }
    table.inv_freq[i] = inv;
  }
  if (rope.type == "yarn") {
    apply_yarn(rope, head_dim, table);
  }
  return table;
}

}  // namespace moelora
