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
constexpr int64_t shrunk_stride(int32_t max_rank) { return (max_rank + 15) / 16 * 16; }

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
  for (int32_t tile = 0; tile < tiles; ++tile) {
    const std::byte* cores = table.granule(slot, record.a + (panel * tiles + tile) * kTileGranules);
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

// acc[8 x 8] summed over its rows is (B shrunk)[n .. n + 7].
template <Dtype kDtype>
HWY_INLINE void expand_core(const AdapterTable& table, int32_t slot, const LoraRecord& record, int32_t n,
                            const float* shrunk, FloatVec* acc) {
  const FloatTag d;
  for (int i = 0; i < kCoreVectors; ++i) acc[i] = hn::Zero(d);
  const int32_t panels = ceil_div(record.rank, kTileRanks);
  for (int32_t panel = 0; panel < panels; ++panel) {
    const int32_t tile = n / kTileColumns * panels + panel;
    const std::byte* cores = table.granule(slot, record.b + tile * tile_granules(kDtype));
    multiply_core<kDtype>(cores + n % kTileColumns / 8 * static_cast<int>(64 * dtype_bytes(kDtype)),
                          shrunk + panel * kTileRanks, acc);
  }
}

// Asks for what expand_add will read first. Adapters of a batch are read once a step: without this each row waits for
// memory, a few lines at a time.
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
  const hn::FixedTag<float, 4> d4;
  const bool bf16 = record.dtype == static_cast<int32_t>(Dtype::kBf16);
  for (int32_t j = 0; j < count; j += 8) {
    FloatVec acc[kCoreVectors];
    if (bf16) {
      expand_core<Dtype::kBf16>(table, slot, record, n + j, shrunk, acc);
    } else {
      expand_core<Dtype::kF32>(table, slot, record, n + j, shrunk, acc);
    }
    const int32_t width = count - j < 8 ? count - j : 8;
    if (width == 8) {
      reduce_core(acc, [&](int first, auto four) HWY_ATTR {
        float* const to = sums + j + first;
        hn::StoreU(hn::Add(hn::LoadU(d4, to), hn::Mul(hn::Set(d4, scale), four)), d4, to);
      });
    } else {
      float delta[8];
      reduce_core(acc, delta);
      for (int32_t i = 0; i < width; ++i) sums[j + i] += scale * delta[i];
    }
    if (record.bias >= 0) {
      const auto* bias =
          reinterpret_cast<const float*>(table.granule(slot, record.bias + (n + j) / kGranuleFloats));
      for (int32_t i = 0; i < width; ++i) sums[j + i] += scale * bias[(n + j) % kGranuleFloats + i];
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace moelora
HWY_AFTER_NAMESPACE();

#endif  // MOELORA_KERNELS_LORA_LORA_INL_H_
