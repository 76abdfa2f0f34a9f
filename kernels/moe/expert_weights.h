// SPDX-License-Identifier: Apache-2.0
// The matrices of a layer's experts as kernels see them, and the activation between their two halves.
#pragma once

#include <cstdint>

#include "kernels/base/dtype.h"

namespace moelora {

enum class ExpertFormat : uint8_t {
  kRows = 0,        // elements of `dtype`, row-major
  kMxfp4Rows = 1,   // data [N][K / 2]: nibbles E2M1, the low one first; scales [N][K / 32]: E8M0 of 32 inputs each
  kMxfp4Tiles = 2,  // as the CUDA kernels read it, gate and up in one (kernels/moe/mxfp4_tiles.h)
};

// One projection of all experts of a layer: E matrices [N, K], each anywhere.
struct ExpertWeights {
  const void* const* data = nullptr;  // [E]
  Dtype dtype = Dtype::kBf16;         // kRows only
  int32_t rows = 0;                   // N
  int32_t cols = 0;                   // K
  ExpertFormat format = ExpertFormat::kRows;
  int32_t row_step = 1;                    // row n is stored row n * row_step: 2 where gate and up alternate
  const uint8_t* const* scales = nullptr;  // [E], MXFP4 only
  const float* bias = nullptr;             // [E, N] or null
};

enum class MoeActivation : uint8_t { kSilu = 0, kClampedSwiglu = 1 };

}  // namespace moelora
