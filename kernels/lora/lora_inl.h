// SPDX-License-Identifier: Apache-2.0
// The two products of LoRA on the tiles of an adapter stream (adapter_layout.h), read through the page table.
// linear, moe_gate_up and moe_down call shrink_panel for the rows of each adapter before their base tiles and
// expand_add in the tail of each tile, for up to kLoraRows rows at a time, which widen a matrix once. Sums run over k
// (ranks) ascending in lanes that the layout fixes, so a row's delta depends on the row alone.
#if defined(MOELORA_KERNELS_LORA_LORA_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOELORA_KERNELS_LORA_LORA_INL_H_
#undef MOELORA_KERNELS_LORA_LORA_INL_H_
#else
#define MOELORA_KERNELS_LORA_LORA_INL_H_
#endif

#include <algorithm>
#include <iterator>

#include "kernels/base/read_spans.h"
#include "kernels/base/simd_inl.h"
#include "kernels/lora/adapter_layout.h"

HWY_BEFORE_NAMESPACE();
namespace moelora {
namespace HWY_NAMESPACE {

constexpr int kCoreVectors = 64 / kLanes;
// Floats from one shrunk row to the next: its ranks, and a line for what the caller keeps beside them.
constexpr int64_t kShrunkBeside = 16;
constexpr int64_t shrunk_stride(int32_t max_rank) { return (max_rank + 15) / 16 * 16 + kShrunkBeside; }

// Rows of one adapter that are multiplied together.
constexpr int kLoraRows = kLanes == 16 ? 4 : 1;

// Granules first .. first + count - 1 of a stream. They nearly always lie in one page: then the page table, with its
// division, is looked at once.
class Granules {
 public:
  Granules() = default;
  HWY_INLINE Granules(const AdapterTable& table, int32_t slot, int32_t first, int32_t count)
      : table_(&table),
        base_(count <= table.run(first) ? table.granule(slot, first) : nullptr),
        slot_(slot),
        first_(first) {}
  HWY_INLINE const std::byte* at(int32_t i) const {
    return base_ != nullptr ? base_ + i * int64_t{kGranuleBytes} : table_->granule(slot_, first_ + i);
  }

 private:
  const AdapterTable* table_ = nullptr;
  const std::byte* base_ = nullptr;
  int32_t slot_ = 0;
  int32_t first_ = 0;
};

// A record's B [n, rank], tile by tile.
HWY_INLINE Granules granules_of_b(const AdapterTable& table, int32_t slot, const LoraRecord& record, int32_t n) {
  return {table, slot, record.b, matrix_granules(record.rank, n, static_cast<Dtype>(record.dtype))};
}

// acc[8 x 8] += core[i][j] * values[j] for fp32 cores.
HWY_INLINE void multiply_core(const std::byte* core, const float* values, FloatVec* acc) {
  const FloatTag d;
  const FloatVec even = repeat8(values, 0);
  const FloatVec odd = kLanes < 8 ? repeat8(values, 1) : even;
#pragma GCC unroll 16
  for (int i = 0; i < kCoreVectors; ++i) {
    const FloatVec weights = hn::LoadU(d, reinterpret_cast<const float*>(core) + i * kLanes);
    acc[i] = hn::MulAdd(weights, i % 2 == 0 ? even : odd, acc[i]);
  }
}

// Sums of eight rows of 4 kBlocks lanes each, which lie one behind the other.
template <int kBlocks>
HWY_INLINE void sum_lanes(const float* lanes, float* sums) {
  const hn::FixedTag<float, 4> d4;
  const hn::Repartition<uint64_t, decltype(d4)> d64;
  for (int i = 0; i < 8; i += 4) {
    hn::Vec<decltype(d4)> row[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const float* from = lanes + (i + r) * 4 * kBlocks;
      row[r] = kBlocks == 1 ? hn::Load(d4, from) : hn::Add(hn::Load(d4, from), hn::Load(d4, from + 4));
    }
    const auto ab = hn::Add(hn::InterleaveLower(d4, row[0], row[1]), hn::InterleaveUpper(d4, row[0], row[1]));
    const auto ce = hn::Add(hn::InterleaveLower(d4, row[2], row[3]), hn::InterleaveUpper(d4, row[2], row[3]));
    const auto low = hn::InterleaveLower(d64, hn::BitCast(d64, ab), hn::BitCast(d64, ce));
    const auto high = hn::InterleaveUpper(d64, hn::BitCast(d64, ab), hn::BitCast(d64, ce));
    hn::StoreU(hn::Add(hn::BitCast(d4, low), hn::BitCast(d4, high)), d4, sums + i);
  }
}

HWY_INLINE void reduce_core(const FloatVec* acc, float* sums) {
  const FloatTag d;
  alignas(64) float lanes[64];
  for (int i = 0; i < kCoreVectors; ++i) hn::Store(acc[i], d, lanes + i * kLanes);
  sum_lanes<2>(lanes, sums);
}

// The columns of a tile from x on, of which `count` exist, zeros behind them.
HWY_INLINE const float* tile_columns(const float* x, int32_t count, float* rest) {
  if (count >= kTileColumns) {
    return x;
  }
  std::memset(rest, 0, kTileColumns * sizeof(float));
  std::memcpy(rest, x, static_cast<size_t>(count) * sizeof(float));
  return rest;
}

HWY_INLINE void shrink_row_f32(const Granules& a, const float* x, int32_t k, float* shrunk) {
  FloatVec acc[kCoreVectors];
  for (FloatVec& sum : acc) sum = hn::Zero(FloatTag());
  for (int32_t tile = 0; tile * kTileColumns < k; ++tile) {
    const std::byte* cores = a.at(tile * tile_granules(Dtype::kF32));
    float rest[kTileColumns];
    const float* values = tile_columns(x + tile * kTileColumns, k - tile * kTileColumns, rest);
    for (int core = 0; core < kTileColumns / 8; ++core) {
      multiply_core(cores + core * 256, values + core * 8, acc);
    }
  }
  reduce_core(acc, shrunk);
}

HWY_INLINE void prefetch_granule(const std::byte* granule) {
#pragma GCC unroll 16
  for (size_t at = 0; at < kGranuleBytes; at += 64) __builtin_prefetch(granule + at, 0, 2);
}

// Two bf16 lie in the 32 bits of a lane: they part by a shift and a mask, and meet the even and the odd elements of x,
// which are parted once for all ranks. Four lanes, one block of 128 bits, are eight elements of one rank.
template <int kRows>
HWY_INLINE void shrink_rows_bf16(const Granules& a, const float* const* x, int32_t k, float* const* shrunk,
                                 ReadSpans::Span next) {
  const FloatTag d;
  constexpr int kVectors = 32 / kLanes;  // of a core
  FloatVec acc[kRows][kVectors][2];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) acc[r][v][0] = acc[r][v][1] = hn::Zero(d);
  }
  alignas(64) float parted[kRows][kTileColumns];
  for (int32_t tile = 0; tile * kTileColumns < k; ++tile) {
    const auto* core = reinterpret_cast<const uint8_t*>(a.at(tile));
    if (tile * int32_t{kGranuleBytes} < next.bytes) {
      prefetch_granule(next.first + tile * int64_t{kGranuleBytes});
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      float rest[kTileColumns];
      const float* values = tile_columns(x[r] + tile * kTileColumns, k - tile * kTileColumns, rest);
#pragma GCC unroll 8
      for (int block = 0; block < kTileColumns; block += kBlock) {
        const FloatVec low = hn::LoadU(d, values + block);
        const FloatVec high = hn::LoadU(d, values + block + kLanes);
        hn::Store(hn::ConcatEven(d, high, low), d, parted[r] + block);
        hn::Store(hn::ConcatOdd(d, high, low), d, parted[r] + block + kLanes);
      }
    }
    for (int block = 0; block < kTileColumns; block += kBlock) {
#pragma GCC unroll 4
      for (int at = block; at < block + kLanes; at += 4, core += 128) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          const FloatVec even = load_half<Stored::kBf16, 0>(core + v * kLanes * 4, 1.0f);
          const FloatVec odd = load_half<Stored::kBf16, 1>(core + v * kLanes * 4, 1.0f);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            acc[r][v][0] = hn::MulAdd(even, hn::LoadDup128(d, parted[r] + at), acc[r][v][0]);
            acc[r][v][1] = hn::MulAdd(odd, hn::LoadDup128(d, parted[r] + at + kLanes), acc[r][v][1]);
          }
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    alignas(64) float lanes[32];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) hn::Store(hn::Add(acc[r][v][0], acc[r][v][1]), d, lanes + v * kLanes);
    sum_lanes<1>(lanes, shrunk[r]);
  }
}

// Calls run(std::integral_constant<int, rows>) for rows in [1, kLoraRows].
template <class Run>
HWY_INLINE void with_lora_rows(int32_t rows, const Run& run) {
  switch (rows) {
    case 1:
      return run(std::integral_constant<int, 1>());
    case 2:
      return run(std::integral_constant<int, std::min(2, kLoraRows)>());
    case 3:
      return run(std::integral_constant<int, std::min(3, kLoraRows)>());
    default:
      return run(std::integral_constant<int, kLoraRows>());
  }
}

// What shrink_panel will read, as far as it lies in one page. Adapters of a batch are read once a step: unless asked
// for before, each matrix is waited for.
HWY_INLINE ReadSpans::Span span_of_shrink(const AdapterTable& table, int32_t slot, const LoraRecord& record,
                                          int32_t panel, int32_t k) {
  const int32_t granules = ceil_div(k, kTileColumns) * tile_granules(static_cast<Dtype>(record.dtype));
  const int32_t first = record.a + panel * granules;
  return {table.granule(slot, first), std::min(granules, table.run(first)) * int32_t{kGranuleBytes}};
}

// shrunk[r][0 .. 7] = A x[r] for eight ranks and `rows` <= kLoraRows rows; x natural order, k wide. `next` is read
// after this: memory works on it while the rows are multiplied.
HWY_INLINE void shrink_panel(const AdapterTable& table, int32_t slot, const LoraRecord& record, int32_t panel,
                             const float* const* x, int32_t rows, int32_t k, float* const* shrunk,
                             ReadSpans::Span next = {}) {
  const int32_t granules = ceil_div(k, kTileColumns) * tile_granules(static_cast<Dtype>(record.dtype));
  const Granules a(table, slot, record.a + panel * granules, granules);
  if (record.dtype == static_cast<int32_t>(Dtype::kBf16)) {
    with_lora_rows(rows, [&](auto count) HWY_ATTR { shrink_rows_bf16<count>(a, x, k, shrunk, next); });
    return;
  }
  for (int32_t at = 0; at < std::min(next.bytes, 4096); at += kGranuleBytes) prefetch_granule(next.first + at);
  for (int32_t r = 0; r < rows; ++r) {
    shrink_row_f32(a, x[r], k, shrunk[r]);
  }
}

// A row that gets scale * (B shrunk) added to its sums.
struct LoraSums {
  const float* shrunk;
  float* sums;
  float scale;
};

HWY_INLINE void add_scaled(const float* delta, int32_t count, float scale, float* sums) {
  for (int32_t i = 0; i < count; ++i) sums[i] += scale * delta[i];
}

// Eight outputs of one row, or the first `count` of them. `first` is the first granule of the tile of B that they lie
// in, n their place in it, j their place in the sums.
HWY_INLINE void expand_group_f32(const Granules& b, int32_t first, int32_t panels, int32_t n, int32_t count,
                                 const LoraSums& row, int32_t j) {
  FloatVec acc[kCoreVectors];
  for (FloatVec& sum : acc) sum = hn::Zero(FloatTag());
  for (int32_t panel = 0; panel < panels; ++panel) {
    multiply_core(b.at(first + panel * tile_granules(Dtype::kF32)) + n / 8 * 256, row.shrunk + panel * kTileRanks, acc);
  }
  float delta[8];
  reduce_core(acc, delta);
  add_scaled(delta, count, row.scale, row.sums + j);
}

// The 32 bits of a lane are two ranks of an output, a block of 128 bits all eight. Transposed, each vector holds two
// ranks of as many outputs as it has lanes: even and odd, as in shrink_rows_bf16. As many outputs as D has lanes.
template <int kRows, class D>
HWY_INLINE void expand_group_bf16(D d, const Granules& b, int32_t first, int32_t panels, int32_t n, int32_t count,
                                  const LoraSums* rows, int32_t j) {
  const hn::RebindToUnsigned<D> du;
  const hn::Repartition<uint64_t, D> d64;
  const hn::Repartition<uint8_t, D> d8;
  constexpr int kWidth = static_cast<int>(hn::MaxLanes(d));
  constexpr int kBlocks = kWidth / 4;
  hn::Vec<D> acc[kRows][2];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) acc[r][0] = acc[r][1] = hn::Zero(d);
  for (int32_t panel = 0; panel < panels; ++panel) {
    const auto* from = reinterpret_cast<const uint8_t*>(b.at(first + panel)) + n * 16;
    const auto load = [&](int v) HWY_ATTR { return hn::BitCast(du, hn::LoadU(d8, from + v * kWidth * 4)); };
    const auto low_a = hn::BitCast(d64, hn::InterleaveLower(du, load(0), load(1)));
    const auto high_a = hn::BitCast(d64, hn::InterleaveUpper(du, load(0), load(1)));
    const auto low_b = hn::BitCast(d64, hn::InterleaveLower(du, load(2), load(3)));
    const auto high_b = hn::BitCast(d64, hn::InterleaveUpper(du, load(2), load(3)));
    const hn::Vec<decltype(d64)> pairs[4] = {
        hn::InterleaveLower(d64, low_a, low_b), hn::InterleaveUpper(d64, low_a, low_b),
        hn::InterleaveLower(d64, high_a, high_b), hn::InterleaveUpper(d64, high_a, high_b)};
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; ++pair) {
      const auto bits = hn::BitCast(du, pairs[pair]);
      const auto even = hn::BitCast(d, hn::ShiftLeft<16>(bits));
      const auto odd = hn::BitCast(d, hn::And(bits, hn::Set(du, 0xffff0000u)));
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const float* shrunk = rows[r].shrunk + panel * kTileRanks + 2 * pair;
        acc[r][0] = hn::MulAdd(even, hn::Set(d, shrunk[0]), acc[r][0]);
        acc[r][1] = hn::MulAdd(odd, hn::Set(d, shrunk[1]), acc[r][1]);
      }
    }
  }
  // Lane 4 i + v is output v * kBlocks + i.
  alignas(64) int32_t order[kWidth];
  for (int i = 0; i < kWidth; ++i) order[i] = 4 * (i % kBlocks) + i / kBlocks;
  const auto indices = hn::SetTableIndices(d, order);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    const auto sum = hn::Add(acc[r][0], acc[r][1]);
    const auto delta = kBlocks == 1 ? sum : hn::TableLookupLanes(sum, indices);
    float* const sums = rows[r].sums + j;
    if (count >= kWidth) {
      hn::StoreU(hn::Add(hn::LoadU(d, sums), hn::Mul(hn::Set(d, rows[r].scale), delta)), d, sums);
    } else {
      alignas(64) float rest[kWidth];
      hn::Store(delta, d, rest);
      add_scaled(rest, count, rows[r].scale, sums);
    }
  }
}

template <int kRows>
HWY_INLINE void expand_tile_bf16(const Granules& b, int32_t first, int32_t panels, int32_t n, int32_t count,
                                 const LoraSums* rows, int32_t j) {
  const hn::CappedTag<float, 8> d8;
  constexpr int kWidth = static_cast<int>(hn::MaxLanes(d8));
  const int32_t end = j + count;
  for (; j + kLanes <= end; j += kLanes, n += kLanes) {
    expand_group_bf16<kRows>(FloatTag(), b, first, panels, n, kLanes, rows, j);
  }
  for (; j < end; j += kWidth, n += kWidth) {
    expand_group_bf16<kRows>(d8, b, first, panels, n, end - j, rows, j);
  }
}

// For `num_rows` <= kLoraRows rows: sums[j] += scale * (B shrunk)[n + j], then += scale * lora_bias[n + j], for
// j < count; n a multiple of 8; b is the record's.
HWY_INLINE void expand_add(const AdapterTable& table, int32_t slot, const LoraRecord& record, const Granules& b,
                           const LoraSums* rows, int32_t num_rows, int32_t n, int32_t count) {
  constexpr int32_t kGranuleFloats = kGranuleBytes / sizeof(float);
  const int32_t panels = ceil_div(record.rank, kTileRanks);
  const int32_t granules = panels * tile_granules(static_cast<Dtype>(record.dtype));
  for (int32_t j = 0, width = 0; j < count; j += width) {
    const int32_t column = (n + j) % kTileColumns;
    const int32_t first = (n + j) / kTileColumns * granules;
    width = std::min(count - j, kTileColumns - column);
    if (record.dtype == static_cast<int32_t>(Dtype::kBf16)) {
      with_lora_rows(num_rows, [&](auto number) HWY_ATTR {
        expand_tile_bf16<number>(b, first, panels, column, width, rows, j);
      });
      continue;
    }
    for (int32_t r = 0; r < num_rows; ++r) {
      for (int32_t i = 0; i < width; i += 8) {
        expand_group_f32(b, first, panels, column + i, std::min(width - i, 8), rows[r], j + i);
      }
    }
  }
  for (int32_t r = 0; record.bias >= 0 && r < num_rows; ++r) {
    for (int32_t j = 0; j < count; ++j) {
      const std::byte* bias = table.granule(slot, record.bias + (n + j) / kGranuleFloats);
      rows[r].sums[j] += rows[r].scale * reinterpret_cast<const float*>(bias)[(n + j) % kGranuleFloats];
    }
  }
}

// The matrices of share `part` of `parts` of what comes after this op, unless they are so many that L2 would lose them
// again, and what this op works on with them.
inline void add_shrinks_ahead(const LoraAhead& ahead, int32_t part, int32_t parts, ReadSpans& spans) {
  constexpr int32_t kBytesMost = 16384;
  constexpr int64_t kBytesTogether = 640 << 10;
  if (ahead.lora == nullptr) {
    return;
  }
  const int32_t segments = ahead.lora->num_segments;
  const auto matrices = std::count_if(std::begin(ahead.modules), std::end(ahead.modules),
                                      [](LoraModule module) { return module != LoraModule::kNone; });
  if (matrices * segments * matrix_granules(ahead.lora->max_rank, ahead.k, Dtype::kBf16) * int64_t{kGranuleBytes} >
      kBytesTogether) {
    return;
  }
  const auto end = static_cast<int32_t>(static_cast<int64_t>(part + 1) * segments / parts);
  for (auto s = static_cast<int32_t>(static_cast<int64_t>(part) * segments / parts); s < end; ++s) {
    for (const LoraModule module : ahead.modules) {
      const int32_t slot = ahead.lora->segment_slot[s];
      const AdapterTable& table = ahead.lora->table;
      const LoraRecord* record = module == LoraModule::kNone ? nullptr : table.dense(slot, ahead.layer, module);
      if (record != nullptr) {
        const int32_t granules = matrix_granules(record->rank, ahead.k, static_cast<Dtype>(record->dtype));
        const int32_t together = std::min(granules, table.run(record->a)) * static_cast<int32_t>(kGranuleBytes);
        spans.add(table.granule(slot, record->a), std::min(together, kBytesMost));
      }
    }
  }
}

// What expand_add will read of B for the outputs n .. n + count - 1, as far as it is worth to ask for it.
HWY_INLINE ReadSpans::Span span_of_expand(const LoraRecord& record, const Granules& b, int32_t n, int32_t count) {
  constexpr int32_t kBytesMost = 2048;
  const int32_t granules = tile_granules(static_cast<Dtype>(record.dtype));
  const int32_t panels = ceil_div(record.rank, kTileRanks);
  const int32_t core_bytes = granules * static_cast<int32_t>(kGranuleBytes) / (kTileColumns / 8);
  const int32_t bytes = panels == 1 ? ceil_div(count, 8) * core_bytes : panels * granules * int32_t{kGranuleBytes};
  return {b.at(n / kTileColumns * panels * granules) + n % kTileColumns / 8 * core_bytes, std::min(bytes, kBytesMost)};
}
HWY_INLINE void prefetch_expand(const LoraRecord& record, const Granules& b, int32_t n, int32_t count) {
  const ReadSpans::Span span = span_of_expand(record, b, n, count);
  for (int32_t at = 0; at < span.bytes; at += 64) {
    __builtin_prefetch(span.first + at);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace moelora
HWY_AFTER_NAMESPACE();

#endif  // MOELORA_KERNELS_LORA_LORA_INL_H_
