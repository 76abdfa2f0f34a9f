// SPDX-License-Identifier: Apache-2.0
// MXFP4 expert matrices in the order in which tensor-core kernels consume them, so that a lane's 16-byte load is its
// whole share of a 16 x 64 tile and no shuffle is needed.
//
// A row tile is 16 rows of an mma operand: for gate_up rows 0-7 are gate outputs 8j .. 8j+7 and rows 8-15 the same
// outputs of up, so that the activation happens inside a thread; for down they are outputs 16j .. 16j+15. k is cut
// into blocks of 64 (zero-filled to the end).
//   data   [row tiles][k blocks][32 lanes] uint4: lane 4g + t holds rows g (x, z) and g + 8 (y, w), inputs
//          8t .. 8t+7 (x, y) and 32 + 8t .. 32 + 8t+7 (z, w) of the block. A word holds its eight values as mixed bits:
//          mxfp4_pair() finds inputs 2i (low half) and 2i + 1 of it in two instructions.
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

// The bits of a bf16 pair that an E2M1 pair fills: signs, and the other three bits as low exponent and high mantissa.
constexpr uint32_t kMxfp4PairMask = 0x81C081C0u;
MOELORA_HD constexpr uint32_t mxfp4_rotate(uint32_t word, int32_t bits) {
  return (word << bits) | (word >> (32 - bits));
}
// Pair i of a word, at the bits of kMxfp4PairMask. Those bits cannot be tiled by four rotations of a word, so that
// plain fields would need two shifts and two masks a pair; but they can be by sums (exclusive or) of rotations, and
// one lop3 adds and masks. The integer pipe is what limits the expansion, so this halving is worth the mixed bits.
MOELORA_HD constexpr uint32_t mxfp4_pair(uint32_t word, int32_t i) {
  const uint32_t by2 = mxfp4_rotate(word, 2);
  switch (i) {
    case 0:
      return word & kMxfp4PairMask;
    case 1:
      return (by2 ^ mxfp4_rotate(word, 6)) & kMxfp4PairMask;
    case 2:
      return (by2 ^ mxfp4_rotate(word, 8)) & kMxfp4PairMask;
    default:
      return mxfp4_rotate(word, 12) & kMxfp4PairMask;
  }
}

// The inverse of mxfp4_pair: of(values), with E2M1 value i in bits 4i .. 4i+3, is the word whose pairs they are. The
// map is linear over bits, so that the word is the sum of one column a set bit.
struct Mxfp4Encoder {
  uint32_t column[32];
  [[nodiscard]] MOELORA_HD constexpr uint32_t of(uint32_t values) const {
    uint32_t word = 0;
    for (int32_t bit = 0; bit < 32; ++bit) {
      word ^= (values >> bit & 1u) != 0 ? column[bit] : 0u;
    }
    return word;
  }
};
// The eight values of a word, in of()'s order.
MOELORA_HD constexpr uint32_t mxfp4_values(uint32_t word) {
  uint32_t values = 0;
  for (int32_t i = 0; i < 4; ++i) {
    const uint32_t pair = mxfp4_pair(word, i);
    const uint32_t low = (pair >> 6 & 7u) | (pair >> 12 & 8u);
    const uint32_t high = (pair >> 22 & 7u) | (pair >> 28 & 8u);
    values |= (low | high << 4) << (8 * i);
  }
  return values;
}
// Gauss-Jordan elimination over bits, at compile time.
constexpr Mxfp4Encoder mxfp4_encoder() {
  uint32_t values[32] = {};
  uint32_t word[32] = {};
  for (int32_t bit = 0; bit < 32; ++bit) {
    values[bit] = mxfp4_values(uint32_t{1} << bit);
    word[bit] = uint32_t{1} << bit;
  }
  for (int32_t bit = 0; bit < 32; ++bit) {
    int32_t pivot = bit;
    while ((values[pivot] >> bit & 1u) == 0) {
      ++pivot;  // past the end, an error of compilation, if the map were not invertible
    }
    const uint32_t pivot_values = values[pivot];
    const uint32_t pivot_word = word[pivot];
    values[pivot] = values[bit];
    word[pivot] = word[bit];
    values[bit] = pivot_values;
    word[bit] = pivot_word;
    for (int32_t other = 0; other < 32; ++other) {
      if (other != bit && (values[other] >> bit & 1u) != 0) {
        values[other] ^= pivot_values;
        word[other] ^= pivot_word;
      }
    }
  }
  Mxfp4Encoder encoder{};
  for (int32_t bit = 0; bit < 32; ++bit) {
    encoder.column[bit] = word[bit];
  }
  return encoder;
}
static_assert(mxfp4_values(mxfp4_encoder().of(0x89ABCDEFu)) == 0x89ABCDEFu);

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
