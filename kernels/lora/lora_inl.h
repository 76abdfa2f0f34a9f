// SPDX-License-Identifier: Apache-2.0
// The two products of LoRA on the tiles of an adapter stream (adapter_layout.h), read through the page table.
// linear, moe_gate_up and moe_down call shrink_panel for each adapter row before their base tiles and
// expand_add in the tail of each tile. Both multiply runs of 8 elements with 8 repeated values; sums run over
// k (ranks) ascending in 8 lanes, so a row's delta depends on the row alone.
#if defined(MOELORA_KERNELS_LORA_LORA_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOELORA_KERNELS_LORA_LORA_INL_H_
#undef MOELORA_KERNELS_LORA_LORA_INL_H_
#else
#define MOELORA_KERNELS_LORA_LORA_INL_H_
#endif

#include "kernels/base/simd_inl.h"
#include "kernels/lora/adapter_layout.h"

HWY_BEFORE_NAMESPACE();
namespace moelora {
namespace HWY_NAMESPACE {

constexpr int kCoreVectors = 64 / kLanes;
// Floats from one shrunk row to the next: its ranks, and a line for what the caller keeps beside them.
constexpr int64_t kShrunkBeside = 16;
constexpr int64_t shrunk_stride(int32_t max_rank) { return (max_rank + 15) / 16 * 16 + kShrunkBeside; }

// Granules first .. first + count - 1 of a stream. They nearly always lie in one page: then the page table, with its
// division, is looked at once.
class Granules {
 public:
  HWY_INLINE Granules(const AdapterTable& table, int32_t slot, int32_t first, int32_t count)
      : table_(table),
        slot_(slot),
        first_(first),
        base_(count <= table.run(first) ? table.granule(slot, first) : nullptr) {}
  HWY_INLINE const std::byte* at(int32_t i) const {
    return base_ != nullptr ? base_ + i * int64_t{kGranuleBytes} : table_.granule(slot_, first_ + i);
  }

 private:
  const AdapterTable& table_;
  int32_t slot_;
  int32_t first_;
  const std::byte* base_;
};

// acc[8 x 8] += core[i][j] * values[j].
template <Dtype kDtype>
HWY_INLINE void multiply_core(const std::byte* core, const float* values, FloatVec* acc) {
  const FloatTag d;
  const FloatVec even = repeat8(values, 0);
  const FloatVec odd = kLanes < 8 ? repeat8(values, 1) : even;
#pragma GCC unroll 16
  for (int i = 0; i < kCoreVectors; ++i) {
    FloatVec weights;
    if constexpr (kDtype == Dtype::kBf16) {
      const hn::Rebind<hwy::bfloat16_t, FloatTag> d16;
      const hn::Repartition<uint8_t, decltype(d16)> d8;
      const auto* bytes = reinterpret_cast<const uint8_t*>(core) + i * kLanes * 2;
      weights = hn::PromoteTo(d, hn::BitCast(d16, hn::LoadU(d8, bytes)));
    } else {
      weights = hn::LoadU(d, reinterpret_cast<const float*>(core) + i * kLanes);
    }
    acc[i] = hn::MulAdd(weights, i % 2 == 0 ? even : odd, acc[i]);
  }
}

// The eight sums of the rows of acc[8 x 8], four at a time: give(first, vector of four).
template <class Give>
HWY_INLINE void reduce_core(const FloatVec* acc, const Give& give) {
  const FloatTag d;
  const hn::FixedTag<float, 4> d4;
  const hn::Repartition<uint64_t, decltype(d4)> d64;
  alignas(64) float lanes[64];
  for (int i = 0; i < kCoreVectors; ++i) hn::Store(acc[i], d, lanes + i * kLanes);
  for (int i = 0; i < 8; i += 4) {
    hn::Vec<decltype(d4)> row[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      row[r] = hn::Add(hn::Load(d4, lanes + (i + r) * 8), hn::Load(d4, lanes + (i + r) * 8 + 4));
    }
    const auto ab = hn::Add(hn::InterleaveLower(d4, row[0], row[1]), hn::InterleaveUpper(d4, row[0], row[1]));
    const auto ce = hn::Add(hn::InterleaveLower(d4, row[2], row[3]), hn::InterleaveUpper(d4, row[2], row[3]));
    const auto low = hn::InterleaveLower(d64, hn::BitCast(d64, ab), hn::BitCast(d64, ce));
    const auto high = hn::InterleaveUpper(d64, hn::BitCast(d64, ab), hn::BitCast(d64, ce));
    give(i, hn::Add(hn::BitCast(d4, low), hn::BitCast(d4, high)));
  }
}

HWY_INLINE void reduce_core(const FloatVec* acc, float* sums) {
  const hn::FixedTag<float, 4> d4;
  reduce_core(acc, [&](int first, auto four) HWY_ATTR { hn::StoreU(four, d4, sums + first); });
}

template <Dtype kDtype>
HWY_INLINE void shrink_panel(const AdapterTable& table, int32_t slot, const LoraRecord& record, int32_t panel,
                             const float* x, int32_t k, float* shrunk) {
  const FloatTag d;
  constexpr int kCoreBytes = static_cast<int>(64 * dtype_bytes(kDtype));
  constexpr int kTileGranules = tile_granules(kDtype);
  FloatVec acc[kCoreVectors];
  for (FloatVec& sum : acc) sum = hn::Zero(d);
  const int32_t tiles = ceil_div(k, kTileColumns);
  const Granules a(table, slot, record.a + panel * tiles * kTileGranules, tiles * kTileGranules);
  for (int32_t tile = 0; tile < tiles; ++tile) {
    const std::byte* cores = a.at(tile * kTileGranules);
    const float* values = x + tile * kTileColumns;
    float rest[kTileColumns] = {};
    if (const int32_t count = k - tile * kTileColumns; count < kTileColumns) {
      std::memcpy(rest, values, static_cast<size_t>(count) * sizeof(float));
      values = rest;
    }
    for (int core = 0; core < kTileColumns / 8; ++core) {
      multiply_core<kDtype>(cores + core * kCoreBytes, values + core * 8, acc);
    }
  }
  reduce_core(acc, shrunk + panel * kTileRanks);
}

// shrunk[8 panel .. +7] = A x for eight ranks; x natural order, k wide.
HWY_INLINE void shrink_panel(const AdapterTable& table, int32_t slot, const LoraRecord& record, int32_t panel,
                             const float* x, int32_t k, float* shrunk) {
  if (record.dtype == static_cast<int32_t>(Dtype::kBf16)) {
    shrink_panel<Dtype::kBf16>(table, slot, record, panel, x, k, shrunk);
  } else {
    shrink_panel<Dtype::kF32>(table, slot, record, panel, x, k, shrunk);
  }
}

#if HWY_TARGET <= HWY_AVX3
// The sums of two cores' rows, a and b, in one vector, in the order of reduce_core's additions.
HWY_INLINE FloatVec reduce_cores(const FloatVec* a, const FloatVec* b) {
  const FloatTag d;
  const hn::Repartition<uint64_t, FloatTag> d64;
  // Blocks of four lanes: of rows 0, 2, 1, 3 and 4, 6, 5, 7, each the sum of its row's two halves.
  const auto halves = [](FloatVec even, FloatVec odd) HWY_ATTR {
    return hn::OddEvenBlocks(hn::Add(odd, hn::SwapAdjacentBlocks(odd)), hn::Add(even, hn::SwapAdjacentBlocks(even)));
  };
  const auto quarters = [&](const FloatVec* acc) HWY_ATTR {
    const FloatVec low = halves(acc[0], acc[1]);
    const FloatVec high = halves(acc[2], acc[3]);
    return hn::BitCast(d64, hn::Add(hn::InterleaveLower(d, low, high), hn::InterleaveUpper(d, low, high)));
  };
  const auto of_a = quarters(a);
  const auto of_b = quarters(b);
  const FloatVec sums = hn::Add(hn::BitCast(d, hn::InterleaveLower(d64, of_a, of_b)),
                                hn::BitCast(d, hn::InterleaveUpper(d64, of_a, of_b)));
  // Block i of `sums` holds rows {0, 2, 1, 3}[i] and 4 more of a, then of b.
  alignas(64) static constexpr int32_t kOrder[16] = {0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15};
  return hn::TableLookupLanes(sums, hn::SetTableIndices(d, kOrder));
}
#endif

// acc[8 x 8] summed over its rows is (B shrunk)[n .. n + 7]; `b` begins with the tile of output n.
template <Dtype kDtype>
HWY_INLINE void expand_core(const Granules& b, int32_t panels, int32_t n, const float* shrunk, FloatVec* acc) {
  const FloatTag d;
  for (int i = 0; i < kCoreVectors; ++i) acc[i] = hn::Zero(d);
  for (int32_t panel = 0; panel < panels; ++panel) {
    multiply_core<kDtype>(
        b.at(panel * tile_granules(kDtype)) + n % kTileColumns / 8 * static_cast<int>(64 * dtype_bytes(kDtype)),
        shrunk + panel * kTileRanks, acc);
  }
}

// sums[j] += scale * (B shrunk)[n + j] for j < count; all in one tile of B, n a multiple of 8.
template <Dtype kDtype>
HWY_INLINE void expand_tile(const Granules& b, int32_t panels, float scale, const float* shrunk, int32_t n,
                            int32_t count, float* sums) {
  const hn::FixedTag<float, 4> d4;
  int32_t j = 0;
#if HWY_TARGET <= HWY_AVX3
  const FloatTag d;
  for (; j + 16 <= count; j += 16) {
    FloatVec acc[2 * kCoreVectors];
    expand_core<kDtype>(b, panels, n + j, shrunk, acc);
    expand_core<kDtype>(b, panels, n + j + 8, shrunk, acc + kCoreVectors);
    const FloatVec delta = reduce_cores(acc, acc + kCoreVectors);
    hn::StoreU(hn::Add(hn::LoadU(d, sums + j), hn::Mul(hn::Set(d, scale), delta)), d, sums + j);
  }
#endif
  for (; j < count; j += 8) {
    FloatVec acc[kCoreVectors];
    expand_core<kDtype>(b, panels, n + j, shrunk, acc);
    if (count - j >= 8) {
      reduce_core(acc, [&](int first, auto four) HWY_ATTR {
        float* const to = sums + j + first;
        hn::StoreU(hn::Add(hn::LoadU(d4, to), hn::Mul(hn::Set(d4, scale), four)), d4, to);
      });
      continue;
    }
    float delta[8];
    reduce_core(acc, delta);
    for (int32_t i = 0; i < count - j; ++i) sums[j + i] += scale * delta[i];
  }
}

// Asks for what shrink_panel and expand_add will read first. Adapters of a batch are read once a step: without this
// each row waits for memory, a few lines at a time.
HWY_INLINE void prefetch_shrink(const AdapterTable& table, int32_t slot, const LoraRecord& record, int32_t panel,
                                int32_t k) {
  constexpr int32_t kBytesMost = 4096;
  const int32_t granules = ceil_div(k, kTileColumns) * tile_granules(static_cast<Dtype>(record.dtype));
  const std::byte* tiles = table.granule(slot, record.a + panel * granules);
  for (int32_t at = 0; at < std::min(granules * int32_t{kGranuleBytes}, kBytesMost); at += 64) {
    __builtin_prefetch(tiles + at, 0, 2);
  }
}
HWY_INLINE void prefetch_expand(const AdapterTable& table, int32_t slot, const LoraRecord& record, int32_t n,
                                int32_t count) {
  constexpr int32_t kBytesMost = 2048;
  const int32_t granules = tile_granules(static_cast<Dtype>(record.dtype));
  const int32_t panels = ceil_div(record.rank, kTileRanks);
  const int32_t core_bytes = granules * static_cast<int32_t>(kGranuleBytes) / (kTileColumns / 8);
  const std::byte* cores = table.granule(slot, record.b + n / kTileColumns * panels * granules);
  const int32_t bytes = panels == 1 ? ceil_div(count, 8) * core_bytes : panels * granules * int32_t{kGranuleBytes};
  for (int32_t at = 0; at < std::min(bytes, kBytesMost); at += 64) {
    __builtin_prefetch(cores + n % kTileColumns / 8 * core_bytes + at);
  }
}

// sums[j] += scale * (B shrunk)[n + j], then += scale * lora_bias[n + j], for j < count; n a multiple of 8.
HWY_INLINE void expand_add(const AdapterTable& table, int32_t slot, const LoraRecord& record, float scale,
                           const float* shrunk, int32_t n, int32_t count, float* sums) {
  constexpr int32_t kGranuleFloats = kGranuleBytes / sizeof(float);
  const bool bf16 = record.dtype == static_cast<int32_t>(Dtype::kBf16);
  const int32_t panels = ceil_div(record.rank, kTileRanks);
  const int32_t granules = panels * tile_granules(static_cast<Dtype>(record.dtype));
  for (int32_t j = 0, width = 0; j < count; j += width) {
    width = std::min(count - j, kTileColumns - (n + j) % kTileColumns);
    const Granules b(table, slot, record.b + (n + j) / kTileColumns * granules, granules);
    if (bf16) {
      expand_tile<Dtype::kBf16>(b, panels, scale, shrunk, n + j, width, sums + j);
    } else {
      expand_tile<Dtype::kF32>(b, panels, scale, shrunk, n + j, width, sums + j);
    }
  }
  for (int32_t j = 0; record.bias >= 0 && j < count; ++j) {
    const std::byte* bias = table.granule(slot, record.bias + (n + j) / kGranuleFloats);
    sums[j] += scale * reinterpret_cast<const float*>(bias)[(n + j) % kGranuleFloats];
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace moelora
HWY_AFTER_NAMESPACE();

#endif  // MOELORA_KERNELS_LORA_LORA_INL_H_
