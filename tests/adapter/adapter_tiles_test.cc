// SPDX-License-Identifier: Apache-2.0
// pack_column_block puts each stored element where the layout says, whichever way it is stored, and finds each value
// that is not finite. Values are bit patterns without a meaning, so that a wrong place or a rounding shows.
#include "runtime/adapter/adapter_tiles.h"

#include <cstring>
#include <vector>

#include "kernels/lora/adapter_layout.h"
#include "tests/support/catch.h"

namespace moelora::test {
namespace {

struct Shape {
  int32_t rank, columns;
  bool is_a;
  bool by_rank;  // the elements of a rank lie together
};

TiledMatrix matrix_of(const Shape& shape, Dtype dtype) {
  TiledMatrix matrix;
  matrix.view.rank_stride = shape.by_rank ? shape.columns : 1;
  matrix.view.column_stride = shape.by_rank ? 1 : shape.rank;
  matrix.view.columns = shape.columns;
  matrix.stored = matrix.dtype = dtype;
  matrix.rank = shape.rank;
  matrix.is_a = shape.is_a;
  return matrix;
}

template <class Word>
struct Packed {
  bool finite = true;
  std::vector<Word> tiles;
};

template <class Word>
Packed<Word> pack(const TiledMatrix& matrix, const std::vector<Word>& stored) {
  Packed<Word> packed;
  const int32_t blocks = (matrix.view.columns + 63) / 64;
  packed.tiles.resize(static_cast<size_t>((matrix.rank + 7) / 8 * blocks) * 512);
  for (int32_t block = 0; block < blocks; ++block) {
    const auto* data = reinterpret_cast<const std::byte*>(stored.data() + block * 64 * matrix.view.column_stride);
    packed.finite &= pack_column_block(matrix, block, data, reinterpret_cast<std::byte*>(packed.tiles.data()));
  }
  return packed;
}

// From the text of adapter_layout.h: tiles of an A by panel of 8 ranks, of a B by block of 64 columns.
size_t place_of(const Shape& shape, int32_t rank, int32_t column) {
  const int32_t panels = (shape.rank + 7) / 8, blocks = (shape.columns + 63) / 64;
  const int32_t panel = rank / 8, block = column / 64, i = rank % 8, j = column % 64;
  const int32_t tile = shape.is_a ? panel * blocks + block : block * panels + panel;
  const int32_t inside = shape.is_a ? j / 8 * 64 + i * 8 + j % 8 : j * 8 + i;
  return static_cast<size_t>(tile) * 512 + static_cast<size_t>(inside);
}

template <class Word>
void check(const Shape& shape, Dtype dtype, Word exponent) {
  CAPTURE(shape.rank, shape.columns, shape.is_a, shape.by_rank);
  const TiledMatrix matrix = matrix_of(shape, dtype);
  std::vector<Word> stored(static_cast<size_t>(shape.rank) * static_cast<size_t>(shape.columns));
  const Word lowest = exponent & static_cast<Word>(-static_cast<int64_t>(exponent));
  for (size_t i = 0; i < stored.size(); ++i) {  // all bits of the exponent but its lowest, in every second one
    stored[i] = static_cast<Word>((i * 2654435761u) & ~exponent) | (i % 2 == 0 ? exponent & ~lowest : lowest);
  }
  const auto at = [&](int32_t rank, int32_t column) {
    return static_cast<size_t>(rank * matrix.view.rank_stride + column * matrix.view.column_stride);
  };
  std::vector<Word> expected((static_cast<size_t>((shape.rank + 7) / 8 * ((shape.columns + 63) / 64))) * 512);
  for (int32_t rank = 0; rank < shape.rank; ++rank) {
    for (int32_t column = 0; column < shape.columns; ++column) {
      expected[place_of(shape, rank, column)] = stored[at(rank, column)];
    }
  }
  const Packed<Word> packed = pack(matrix, stored);
  CHECK(packed.finite);
  CHECK(packed.tiles == expected);
  int missed = 0;
  for (Word& value : stored) {
    const Word before = value;
    value = exponent;  // infinity; then NaN, of either sign
    missed += pack(matrix, stored).finite ? 1 : 0;
    value = static_cast<Word>(~Word{0});
    missed += pack(matrix, stored).finite ? 1 : 0;
    value = before;
  }
  CHECK(missed == 0);
}

}  // namespace

TEST_CASE("each element has its place in the tiles, and none that is not finite is missed") {
  for (const bool is_a : {true, false}) {
    for (const bool by_rank : {true, false}) {
      for (const int32_t rank : {8, 16, 5}) {
        for (const int32_t columns : {64, 72, 67}) {
          check<uint16_t>({rank, columns, is_a, by_rank}, Dtype::kBf16, 0x7f80);
          check<uint32_t>({rank, columns, is_a, by_rank}, Dtype::kF32, 0x7f800000);
        }
      }
    }
  }
}

}  // namespace moelora::test
