// SPDX-License-Identifier: Apache-2.0
// Views of matrices. A view borrows memory and knows its element type; it owns nothing.
#pragma once

#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/error.h"

namespace moelora {

// A weight matrix [rows, cols] as stored, row-major without gaps; `data` needs no alignment.
struct Weight {
  const void* data = nullptr;
  Dtype dtype = Dtype::kBf16;
  int32_t rows = 0;
  int32_t cols = 0;
  [[nodiscard]] bool empty() const { return data == nullptr; }
};

// Activations: element (t, i) is data[t * stride + i]. fp32 on the CPU backend; a GPU backend may hold
// bf16. Aligned to 64 bytes.
struct Rows {
  void* data = nullptr;
  Dtype dtype = Dtype::kF32;
  int64_t stride = 0;
  [[nodiscard]] float* f32() const {
    MOELORA_ASSERT(dtype == Dtype::kF32);
    return static_cast<float*>(data);
  }
  [[nodiscard]] float* row(int64_t t) const { return f32() + t * stride; }
};

// How activations enter a product. kExact: fp32. kBf16: rounded to bf16 first (option `compute`).
enum class Compute : uint8_t { kExact = 0, kBf16 = 1 };

}  // namespace moelora
