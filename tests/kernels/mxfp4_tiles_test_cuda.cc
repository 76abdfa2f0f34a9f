// SPDX-License-Identifier: Apache-2.0
// pack_mxfp4_cuda against the text of kernels/moe/mxfp4_tiles.h, read with nothing but the values that a pair's bits
// have as bf16; and the encoding of a word, which needs no device.
#include "kernels/moe/mxfp4_tiles.h"

#include "tests/kernels/device_experts.h"
#include "tests/support/catch.h"

using namespace moelora;
using namespace moelora::test;

namespace {

// Input i (0 .. 7) of a word, from its place as a bf16 2^126 times too small.
float word_value(uint32_t word, int32_t i) {
  const uint32_t pair = mxfp4_pair(word, i / 2);
  return bf16_to_f32(static_cast<uint16_t>(i % 2 == 0 ? pair & 0xFFFFu : pair >> 16)) * 0x1p126f;
}

// Stored row of row r of a tile, -1 = past the end.
int32_t stored_row(int32_t tile, int32_t r, int32_t rows, bool gate_up) {
  const int32_t n = gate_up ? 8 * tile + r % 8 : 16 * tile + r;
  return n >= rows ? -1 : (gate_up ? 2 * n + r / 8 : n);
}

void check_pack(int32_t rows, int32_t cols, bool gate_up, uint32_t seed) {
  INFO("rows " << rows << " cols " << cols << " gate_up " << gate_up);
  Draw draw(seed);
  const Mxfp4Rows stored(gate_up ? 2 * rows : rows, cols, 1, kMxfp4ScaleMax, draw);
  const Mxfp4TileShape shape = gate_up ? mxfp4_gate_up_shape(rows, cols) : mxfp4_down_shape(rows, cols);
  const DeviceBuffer blocks(stored.blocks);
  const DeviceBuffer scales(stored.scales);
  const DeviceBuffer tiles(static_cast<size_t>(shape.data_bytes()));
  const DeviceBuffer tile_scales(static_cast<size_t>(shape.scale_bytes()));
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  pack_mxfp4_cuda({blocks.as<uint8_t>(), scales.as<uint8_t>(), rows, cols, gate_up, tiles.data(), tile_scales.data()},
                  *gpu()->stream);
  const std::vector<uint32_t> words = tiles.read<uint32_t>();
  const std::vector<uint8_t> bytes = tile_scales.read<uint8_t>();
  int64_t wrong_values = 0;
  int64_t wrong_scales = 0;
  for (int32_t tile = 0; tile < shape.row_tiles; ++tile) {
    for (int32_t r = 0; r < 16; ++r) {
      const int32_t row = stored_row(tile, r, rows, gate_up);
      for (int32_t k = 0; k < shape.k_blocks * 64; ++k) {
        const int32_t block = k / 64;
        const int32_t lane = r % 8 * 4 + k % 32 / 8;
        const int32_t word = r / 8 + k % 64 / 32 * 2;
        const auto at =
            (static_cast<size_t>(tile) * static_cast<size_t>(shape.k_blocks) + static_cast<size_t>(block)) * 128 +
            static_cast<size_t>(lane * 4 + word);
        const size_t from = static_cast<size_t>(row) * static_cast<size_t>(cols) + static_cast<size_t>(k);
        const bool there = row >= 0 && k < cols;
        const int32_t nibble = there ? (k % 2 == 0 ? stored.blocks[from / 2] & 15 : stored.blocks[from / 2] >> 4) : 0;
        wrong_values += word_value(words[at], k % 8) == e2m1(nibble) ? 0 : 1;
        const auto scale_at =
            ((static_cast<size_t>(tile) * static_cast<size_t>(shape.scale_groups()) + static_cast<size_t>(block / 4)) *
                 8 +
             static_cast<size_t>(r % 8)) *
                16 +
            static_cast<size_t>(block % 4 * 4 + r / 8 * 2 + k % 64 / 32);
        wrong_scales += bytes[scale_at] == (there ? stored.scales[from / 32] : 0) ? 0 : 1;
      }
    }
  }
  CHECK(wrong_values == 0);
  CHECK(wrong_scales == 0);
  CHECK(tiles.guard_intact());
  CHECK(tile_scales.guard_intact());
}

}  // namespace

TEST_CASE("a word of an MXFP4 tile holds any eight values") {
  Draw draw(1);
  constexpr Mxfp4Encoder kEncoder = mxfp4_encoder();
  for (int32_t i = 0; i < 2000; ++i) {
    int32_t nibbles[8];
    uint32_t values = 0;
    for (int32_t j = 0; j < 8; ++j) {
      nibbles[j] = draw.below(16);
      values |= static_cast<uint32_t>(nibbles[j]) << (4 * j);
    }
    const uint32_t word = kEncoder.of(values);
    for (int32_t j = 0; j < 8; ++j) {
      REQUIRE(word_value(word, j) == e2m1(nibbles[j]));
    }
    REQUIRE(mxfp4_values(word) == values);
  }
}

TEST_CASE("pack_mxfp4_cuda puts every value and scale where the layout says, and zeros past the end") {
  if (gpu() == nullptr) {
    return;
  }
  uint32_t seed = 10;
  for (const bool gate_up : {false, true}) {
    for (const int32_t rows : {1, 8, 20, 48}) {
      for (const int32_t cols : {32, 64, 96, 320, 2880}) {
        check_pack(rows, cols, gate_up, ++seed);
      }
    }
  }
}
