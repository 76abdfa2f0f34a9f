// SPDX-License-Identifier: Apache-2.0
// Safetensors bytes from values: encodes F32, F16 and BF16 by arithmetic on doubles, so that it shares nothing with the
// conversions it tests. Over SafetensorsBuilder of model_files.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "tests/support/model_files.h"

namespace moelora::test {

// Nearest value with `mantissa` explicit bits and smallest normal exponent `exponent_min`, ties to even; the encoding's
// exponent field counts from there. Finite values in range only.
inline uint32_t encode_float(double value, int mantissa, int exponent_min, int total_bits) {
  const uint32_t sign = std::signbit(value) ? 1u << (total_bits - 1) : 0u;
  const double magnitude = std::fabs(value);
  if (magnitude == 0.0) {
    return sign;
  }
  int exponent = 0;
  std::frexp(magnitude, &exponent);  // magnitude = f * 2^exponent, f in [0.5, 1)
  exponent = std::max(exponent - 1, exponent_min);
  const auto steps = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, mantissa - exponent)));
  // `steps` counts units of the last place; a full mantissa carries into the exponent field by itself.
  return sign | ((static_cast<uint32_t>(exponent - exponent_min) << mantissa) + steps);
}

inline std::string encode_values(const std::string& dtype, const std::vector<float>& values) {
  std::string bytes;
  for (const float value : values) {
    if (dtype == "F32") {
      char raw[4];
      std::memcpy(raw, &value, sizeof raw);
      bytes.append(raw, sizeof raw);
    } else {
      const bool f16 = dtype == "F16";
      uint32_t bits = 0;
      if (std::isfinite(value)) {
        bits = f16 ? encode_float(value, 10, -14, 16) : encode_float(value, 7, -126, 16);
      } else {
        bits = (f16 ? 0x7c00u : 0x7f80u) | (std::isnan(value) ? 1u : 0u) | (std::signbit(value) ? 0x8000u : 0u);
      }
      bytes += static_cast<char>(bits & 0xff);
      bytes += static_cast<char>(bits >> 8);
    }
  }
  return bytes;
}

// What a value becomes when stored in `dtype`.
inline float stored_value(const std::string& dtype, float value) {
  if (dtype == "F32" || value == 0.0f) {
    return value;
  }
  int exponent = 0;
  std::frexp(value, &exponent);
  const int unit = (dtype == "F16" ? std::max(exponent - 1, -14) - 10 : std::max(exponent - 1, -126) - 7);
  return static_cast<float>(std::ldexp(std::nearbyint(std::ldexp(static_cast<double>(value), -unit)), unit));
}

class SafetensorsWriter {
 public:
  void add(const std::string& name, const std::vector<int64_t>& shape, const std::vector<float>& values,
           const std::string& dtype = "F32") {
    builder_.add(name, dtype, shape, encode_values(dtype, values));
  }
  [[nodiscard]] std::string text() const { return builder_.text(); }

 private:
  SafetensorsBuilder builder_;
};

}  // namespace moelora::test
