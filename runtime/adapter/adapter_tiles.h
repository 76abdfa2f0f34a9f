// SPDX-License-Identifier: Apache-2.0
// The inner loops of packing: elements of a stored matrix into 8 x 64 tiles, with conversion and a check that all
// are finite. Used by adapter_packer alone.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "runtime/adapter/adapter_packer.h"

namespace moelora {

// An A or B as it is stored and as it is in the stream.
struct TiledMatrix {
  MatrixView view;
  Dtype stored = Dtype::kF32;
  int32_t rank = 0;
  Dtype dtype = Dtype::kBf16;  // in the stream
  bool is_a = false;
};

// Writes the tiles of columns 64 * block .. +63, of all ranks, from `data`, where the block's first element is stored;
// `out` is where the matrix begins in the stream, and holds zeros where nothing is written. False if a written value is
// not finite.
bool pack_column_block(const TiledMatrix& matrix, int32_t block, const std::byte* data, std::byte* out);

// Writes `count` values stored at `data` as fp32. False if a value is not finite.
bool pack_bias(Dtype stored, size_t count, const std::byte* data, std::byte* out);

// Dtype of a stored tensor; false if it is none that adapters use.
bool parse_dtype(const std::string& name, Dtype& dtype);

// Fills bf16 matrices with random values: sign, two low bits of the exponent and mantissa are random.
class TileRandom {
 public:
  explicit TileRandom(uint64_t seed);
  void fill_matrix(int32_t rank, int32_t columns, bool is_a, std::byte* matrix);

 private:
  uint64_t next();
  std::array<uint64_t, 2> state_;
};

}  // namespace moelora
