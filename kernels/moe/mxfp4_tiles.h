// SPDX-License-Identifier: Apache-2.0
// MXFP4 expert matrices in the order in which tensor-core kernels consume them, so that a lane's 16-byte load is its
// whole share of a 16 x 64 tile and no shuffle is needed.
//
// A row tile is 16 rows of an mma operand: for gate_up rows 0-7 are gate outputs 8j .. 8j+7 and rows 8-15 the same
// outputs of up, so that the activation happens inside a thread; for down they are outputs 16j .. 16j+15. k is cut
// into blocks of 64 (zero-filled to the end).
//   data   [row tiles][k blocks][32 lanes] uint4: lane 4g + t holds rows g (x, z) and g + 8 (y, w), inputs
//          8t .. 8t+7 (x, y) and 32 + 8t .. 32 + 8t+7 (z, w) of the block. In a word, input 2i sits at bit 12 - 4i and
//          input 2i + 1 at bit 28 - 4i: shifting left by 4i puts pair i where bf16 wants sign and exponent.
//   scales [row tiles][ceil(k blocks / 4)][8 g][4 blocks] uint32: E8M0 of (row g, first 32), (row g, second 32),
//          (row g + 8, first 32), (row g + 8, second 32), from the low byte up.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/host_device.h"
#include "kernels/base/stream.h"

namespace moelora {

constexpr int32_t kMxfp4TileBytes = 512;
constexpr int32_t kMxfp4ScaleGroupBytes = 128;
// Largest E8M0 byte that the kernels expand: 2^(E - 1) must be a finite bf16.
constexpr int32_t kMxfp4ScaleMax = 128;

struct Mxfp4TileShape {
  int32_t row_tiles;
  int32_t k_blocks;
  [[nodiscard]] MOELORA_HD int32_t scale_groups() const { return (k_blocks + 3) / 4; }
  [[nodiscard]] MOELORA_HD int64_t data_bytes() const { return int64_t{row_tiles} * k_blocks * kMxfp4TileBytes; }
  [[nodiscard]] MOELORA_HD int64_t scale_bytes() const {
    return int64_t{row_tiles} * scale_groups() * kMxfp4ScaleGroupBytes;
  }
};
// `rows` outputs of each of gate and up.
MOELORA_HD constexpr Mxfp4TileShape mxfp4_gate_up_shape(int32_t rows, int32_t cols) {
  return {(rows + 7) / 8, (cols + 63) / 64};
}
MOELORA_HD constexpr Mxfp4TileShape mxfp4_down_shape(int32_t rows, int32_t cols) {
  return {(rows + 15) / 16, (cols + 63) / 64};
}

// pack_mxfp4: one matrix from rows (ExpertFormat::kMxfp4Rows) into tiles. Gate and up: `rows` outputs each, row n of
// gate stored as row 2n, of up as row 2n + 1. Rows and inputs past the end become zeros.
struct PackMxfp4Args {
  const uint8_t* blocks = nullptr;  // [stored rows, cols / 2]
  const uint8_t* scales = nullptr;  // [stored rows, cols / 32]
  int32_t rows = 0;
  int32_t cols = 0;
  bool gate_up = false;
  void* tiles = nullptr;        // data_bytes() of the shape
  void* tile_scales = nullptr;  // scale_bytes()
};
void pack_mxfp4_cuda(const PackMxfp4Args& args, Stream& stream);

}  // namespace moelora
