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

// Writes the tiles of columns 64 * block .. +63, of all ranks; `matrix` is where the matrix begins in the stream, and
// holds zeros where nothing is written. False if a written value is not finite.
bool pack_column_block(const MatrixView& view, int32_t rank, Dtype dtype, bool is_a, int32_t block, std::byte* matrix);

// Writes a stored vector as fp32. False if a value is not finite.
bool pack_bias(const StoredTensor& tensor, std::byte* out);

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
