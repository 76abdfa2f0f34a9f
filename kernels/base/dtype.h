// SPDX-License-Identifier: Apache-2.0
// Element types of tensors in files and in memory. Depends on nothing; everything above uses it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace moelora {

enum class Dtype : uint8_t { kF32 = 0, kF16 = 1, kBf16 = 2 };

constexpr size_t dtype_bytes(Dtype dtype) {
  return dtype == Dtype::kF32 ? 4 : 2;
}
constexpr const char* dtype_name(Dtype dtype) {
  return dtype == Dtype::kF32 ? "F32" : dtype == Dtype::kF16 ? "F16" : "BF16";
}

inline float bf16_to_f32(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Round to nearest even; NaN stays NaN.
inline uint16_t f32_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return static_cast<uint16_t>((bits >> 16) | 0x40u);
  }
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>(bits >> 16);
}

inline float f16_to_f32(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  uint32_t wide;
  float value;
  if (exponent == 0) {  // zero and subnormal: mantissa * 2^-24, exact in float
    value = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    std::memcpy(&wide, &value, sizeof wide);
    wide |= sign;
  } else if (exponent == 31) {
    wide = sign | 0x7f800000u | (mantissa << 13);
  } else {
    wide = sign | ((exponent + 112u) << 23) | (mantissa << 13);
  }
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Element `index` of an array of `dtype` as float; `data` needs no alignment.
inline float load_element(const void* data, Dtype dtype, size_t index) {
  const char* bytes = static_cast<const char*>(data) + index * dtype_bytes(dtype);
  if (dtype == Dtype::kF32) {
    float value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, bytes, sizeof bits);
  return dtype == Dtype::kF16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

}  // namespace moelora
