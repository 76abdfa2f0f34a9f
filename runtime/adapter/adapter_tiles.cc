// SPDX-License-Identifier: Apache-2.0
// See adapter_tiles.h. Loops are templates on the stored and the packed type so that a 0.5 GB adapter is limited by
// memory and not by a dispatch for each element.
#include "runtime/adapter/adapter_tiles.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "kernels/base/error.h"

namespace moelora {
namespace {

constexpr int32_t kTileElements = kTileRanks * kTileColumns;

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

template <class T>
T load(const std::byte* data, int64_t index) {
  T value;
  std::memcpy(&value, data + index * static_cast<int64_t>(sizeof(T)), sizeof value);
  return value;
}

inline float to_float(float value) {
  return value;
}
inline float to_float(Bf16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}
// Without branches: the exponent is rebiased by a multiplication, which is exact and also right for subnormals.
inline float to_float(F16 value) {
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  const auto scaled = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  const uint32_t wide = (value.bits & 0x7c00u) == 0x7c00u ? magnitude | 0x7f800000u : scaled;
  return std::bit_cast<float>(wide | static_cast<uint32_t>(value.bits & 0x8000u) << 16);
}

template <class Stored>
void store(uint16_t* out, Stored value) {
  if constexpr (std::is_same_v<Stored, Bf16>) {
    *out = value.bits;
  } else {
    *out = f32_to_bf16(to_float(value));
  }
}
template <class Stored>
void store(float* out, Stored value) {
  *out = to_float(value);
}

// A vector type, since GCC makes none of loops over words that are also stored.
using WordPair [[gnu::vector_size(16)]] = uint64_t;

template <class Packed>
struct Run {
  WordPair words[8 * sizeof(Packed) / sizeof(WordPair)];
};

// Whether all exponents of some runs of 8 elements are below their largest value. Word by word: the mask keeps the
// exponent of each element, and adding its lowest bit carries into the sign's place only if all bits are set.
template <class Packed>
class FiniteCheck {
 public:
  void add(const Run<Packed>& run) {
    for (const WordPair& words : run.words) {
      bad_ |= (words & kExponent) + kLowest;
    }
  }
  [[nodiscard]] bool is_finite() const { return ((bad_[0] | bad_[1]) & kCarry) == 0; }

 private:
  static constexpr bool kHalf = sizeof(Packed) == 2;
  static constexpr uint64_t kExponent = kHalf ? 0x7f807f807f807f80u : 0x7f8000007f800000u;
  static constexpr uint64_t kLowest = kHalf ? 0x0080008000800080u : 0x0080000000800000u;
  static constexpr uint64_t kCarry = kHalf ? 0x8000800080008000u : 0x8000000080000000u;
  WordPair bad_ = {};
};

template <class Packed>
bool all_finite(const Packed* tile) {
  FiniteCheck<Packed> check;
  for (int32_t i = 0; i < kTileElements; i += 8) {
    Run<Packed> run;
    std::memcpy(&run, tile + i, sizeof run);
    check.add(run);
  }
  return check.is_finite();
}

struct TileSource {
  const std::byte* data;  // of element (rank 0, column 0) of the tile
  int64_t rank_stride;
  int64_t column_stride;
  int32_t ranks;    // of 8
  int32_t columns;  // of 64
};

// Runs of up to 8 elements that lie together in the tile. Whole runs have loops with a count the compiler knows; those
// that need no conversion are copied.
struct Runs {
  const std::byte* data;
  int64_t run_stride;
  int64_t step;  // between the elements of a run
  int32_t count;
  int32_t length;
};

template <class Stored, class Packed>
void pack_runs(const Runs& runs, Packed* out, int32_t out_stride) {
  constexpr bool kSame = sizeof(Stored) == sizeof(Packed) && !std::is_same_v<Stored, F16>;
  for (int32_t i = 0; i < runs.count; ++i) {
    const std::byte* run = runs.data + i * runs.run_stride * static_cast<int64_t>(sizeof(Stored));
    Packed* to = out + i * out_stride;
    if (runs.length == 8 && runs.step == 1 && kSame) {
      std::memcpy(to, run, 8 * sizeof(Packed));
    } else if (runs.length == 8 && runs.step == 1) {
      for (int32_t j = 0; j < 8; ++j) {
        store(to + j, load<Stored>(run, j));
      }
    } else if (runs.length == 8) {
      for (int32_t j = 0; j < 8; ++j) {
        store(to + j, load<Stored>(run, j * runs.step));
      }
    } else {
      for (int32_t j = 0; j < runs.length; ++j) {
        store(to + j, load<Stored>(run, j * runs.step));
      }
    }
  }
}

// A whole tile whose runs lie together as they are stored: copied and checked in one go. `from(i, j)` is where one of
// its 8 x 8 runs is stored, to(i, j) which it is in the tile.
template <class Packed, class From, class To>
bool copy_tile(const From& from, const To& to, Packed* tile) {
  FiniteCheck<Packed> check;
  for (int32_t i = 0; i < kTileRanks; ++i) {
    for (int32_t j = 0; j < 8; ++j) {
      Run<Packed> run;
      std::memcpy(&run, from(i, j), sizeof run);
      std::memcpy(tile + to(i, j) * 8, &run, sizeof run);
      check.add(run);
    }
  }
  return check.is_finite();
}

template <class Stored, class Packed>
bool pack_tile(const TileSource& source, bool is_a, Packed* tile) {
  constexpr bool kSame = sizeof(Stored) == sizeof(Packed) && !std::is_same_v<Stored, F16>;
  constexpr auto kBytes = static_cast<int64_t>(sizeof(Stored));
  if constexpr (kSame) {
    const bool is_whole = source.ranks == kTileRanks && source.columns == kTileColumns;
    if (is_whole && is_a && source.column_stride == 1) {
      return copy_tile<Packed>(
          [&](int32_t i, int32_t j) { return source.data + (i * source.rank_stride + j * 8) * kBytes; },
          [](int32_t i, int32_t j) { return j * 8 + i; }, tile);
    }
    if (is_whole && !is_a && source.rank_stride == 1) {
      return copy_tile<Packed>(
          [&](int32_t i, int32_t j) { return source.data + (i * 8 + j) * source.column_stride * kBytes; },
          [](int32_t i, int32_t j) { return i * 8 + j; }, tile);
    }
  }
  if (!is_a) {  // a run is an output's ranks
    pack_runs<Stored>({source.data, source.column_stride, source.rank_stride, source.columns, source.ranks}, tile, 8);
    return all_finite(tile);
  }
  const int32_t whole = source.columns / 8;  // a run is 8 columns of a rank
  for (int32_t i = 0; i < source.ranks; ++i) {
    const std::byte* row = source.data + i * source.rank_stride * static_cast<int64_t>(sizeof(Stored));
    pack_runs<Stored>({row, 8 * source.column_stride, source.column_stride, whole, 8}, tile + i * 8, 64);
    if (source.columns > whole * 8) {
      const std::byte* rest = row + whole * 8 * source.column_stride * static_cast<int64_t>(sizeof(Stored));
      pack_runs<Stored>({rest, 0, source.column_stride, 1, source.columns - whole * 8}, tile + whole * 64 + i * 8, 64);
    }
  }
  return all_finite(tile);
}

template <class Stored, class Packed>
bool pack_block(const TiledMatrix& matrix, int32_t block, const std::byte* data, std::byte* out) {
  constexpr auto kStoredBytes = static_cast<int64_t>(sizeof(Stored));
  const MatrixView& view = matrix.view;
  const int32_t panels = ceil_div(matrix.rank, kTileRanks);
  const int32_t blocks = ceil_div(view.columns, kTileColumns);
  bool finite = true;
  for (int32_t panel = 0; panel < panels; ++panel) {
    const int64_t tile = matrix.is_a ? int64_t{panel} * blocks + block : int64_t{block} * panels + panel;
    const TileSource source{data + int64_t{panel} * kTileRanks * view.rank_stride * kStoredBytes, view.rank_stride,
                            view.column_stride, std::min(kTileRanks, matrix.rank - panel * kTileRanks),
                            std::min(kTileColumns, view.columns - block * kTileColumns)};
    std::byte* at = out + tile * tile_granules(matrix.dtype) * static_cast<int64_t>(kGranuleBytes);
    finite &= pack_tile<Stored>(source, matrix.is_a, reinterpret_cast<Packed*>(at));
  }
  return finite;
}

template <class Packed>
bool pack_block_to(const TiledMatrix& matrix, int32_t block, const std::byte* data, std::byte* out) {
  switch (matrix.stored) {
    case Dtype::kF32:
      return pack_block<float, Packed>(matrix, block, data, out);
    case Dtype::kF16:
      return pack_block<F16, Packed>(matrix, block, data, out);
    case Dtype::kBf16:
      return pack_block<Bf16, Packed>(matrix, block, data, out);
  }
  MOELORA_ASSERT(false);
}

uint64_t split_mix(uint64_t& state) {
  uint64_t z = (state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace

bool parse_dtype(const std::string& name, Dtype& dtype) {
  for (const Dtype candidate : {Dtype::kF32, Dtype::kF16, Dtype::kBf16}) {
    if (name == dtype_name(candidate)) {
      dtype = candidate;
      return true;
    }
  }
  return false;
}

bool pack_column_block(const TiledMatrix& matrix, int32_t block, const std::byte* data, std::byte* out) {
  MOELORA_ASSERT(matrix.dtype == Dtype::kBf16 || matrix.dtype == Dtype::kF32);
  return matrix.dtype == Dtype::kBf16 ? pack_block_to<uint16_t>(matrix, block, data, out)
                                      : pack_block_to<float>(matrix, block, data, out);
}

bool pack_bias(Dtype stored, size_t count, const std::byte* data, std::byte* out) {
  bool finite = true;
  for (size_t i = 0; i < count; ++i) {
    const float value = load_element(data, stored, i);
    finite &= (std::bit_cast<uint32_t>(value) & 0x7f800000u) != 0x7f800000u;
    std::memcpy(out + i * sizeof value, &value, sizeof value);
  }
  return finite;
}

TileRandom::TileRandom(uint64_t seed) : state_{split_mix(seed), split_mix(seed) | 1u} {}

// xorshift128+: four elements a call, and a benchmark makes tens of adapters.
uint64_t TileRandom::next() {
  uint64_t x = state_[0];
  const uint64_t y = state_[1];
  state_[0] = y;
  x ^= x << 23;
  state_[1] = x ^ y ^ (x >> 17) ^ (y >> 26);
  return state_[1] + y;
}

void TileRandom::fill_matrix(int32_t rank, int32_t columns, bool is_a, std::byte* matrix) {
  constexpr uint64_t kRandomBits = 0x81ff81ff81ff81ffu;
  constexpr uint64_t kExponent = 0x3a003a003a003a00u;  // 2^-11 with the two low bits of the exponent clear
  const int32_t panels = ceil_div(rank, kTileRanks);
  const int32_t blocks = ceil_div(columns, kTileColumns);
  for (int32_t tile = 0; tile < panels * blocks; ++tile) {
    std::byte* out = matrix + static_cast<size_t>(tile) * kGranuleBytes;
    for (size_t byte = 0; byte < kGranuleBytes; byte += sizeof(uint64_t)) {
      const uint64_t word = (next() & kRandomBits) | kExponent;
      std::memcpy(out + byte, &word, sizeof word);
    }
    const int32_t panel = is_a ? tile / blocks : tile % panels;
    const int32_t block = is_a ? tile % blocks : tile / panels;
    const int32_t ranks = std::min(kTileRanks, rank - panel * kTileRanks);
    const int32_t width = std::min(kTileColumns, columns - block * kTileColumns);
    if (ranks == kTileRanks && width == kTileColumns) {
      continue;
    }
    for (int32_t i = 0; i < kTileRanks; ++i) {
      for (int32_t j = 0; j < kTileColumns; ++j) {
        if (i >= ranks || j >= width) {
          const int32_t index = is_a ? tile_index_a(i, j) : tile_index_b(i, j);
          std::memset(out + index * 2, 0, 2);
        }
      }
    }
  }
}

}  // namespace moelora
