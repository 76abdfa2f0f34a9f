// SPDX-License-Identifier: Apache-2.0
// Products of stored weight rows with packed activation rows: the microkernels under linear, moe_gate_up and
// moe_down. Two ways to the same bits: dot_direct widens weights in registers (few rows: the weights come from
// memory once and bandwidth is the limit), dot_widened reads a tile that widen_tile made fp32 before (many
// rows). Both keep one accumulator vector for each (row, output), add products in ascending k and end in
// reduce4, so a row's bits do not depend on which of them ran, nor on how many rows ran with it.
#if defined(MOELORA_KERNELS_DENSE_DOT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOELORA_KERNELS_DENSE_DOT_INL_H_
#undef MOELORA_KERNELS_DENSE_DOT_INL_H_
#else
#define MOELORA_KERNELS_DENSE_DOT_INL_H_
#endif

#include "kernels/base/simd_inl.h"
#include "kernels/base/tensor.h"

HWY_BEFORE_NAMESPACE();
namespace moelora {
namespace HWY_NAMESPACE {

constexpr int kGroup = 4;                           // outputs of a microkernel
constexpr int kPanel = kLanes == 16 ? 6 : 3;        // rows of a microkernel: 24 (12) accumulators
constexpr int kDepth = 1024;                        // elements of k a microkernel runs over at once: fits L1

constexpr int64_t padded_k(int64_t k) { return (k + 63) / 64 * 64; }

// Nearest bf16, ties to even, kept in 32 bits; NaN stays NaN. As f32_to_bf16.
HWY_INLINE FloatVec round_to_bf16(FloatVec value) {
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> du;
  const auto bits = hn::BitCast(du, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto high = hn::Set(du, 0xffff0000u);
  const auto rounded = hn::And(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fffu))), high);
  const auto quiet = hn::And(hn::Or(bits, hn::Set(du, 0x00400000u)), high);
  return hn::IfThenElse(hn::IsNaN(value), hn::BitCast(d, quiet), hn::BitCast(d, rounded));
}

// One activation row in the order of the weights' dtype, zeros up to padded_k(k).
HWY_INLINE void pack_row(const float* x, int32_t k, PackOrder order, Compute compute, float* packed) {
  const FloatTag d;
  const int64_t padded = padded_k(k);
  for (int64_t block = 0; block < padded; block += kBlock) {
    const float* from = x + block;
    float rest[kBlock] = {};
    if (block + kBlock > k) {
      for (int64_t i = 0; block + i < k; ++i) rest[i] = x[block + i];
      from = rest;
    }
    FloatVec low = hn::LoadU(d, from);
    FloatVec high = hn::LoadU(d, from + kLanes);
    if (compute == Compute::kBf16) {
      low = round_to_bf16(low);
      high = round_to_bf16(high);
    }
    const bool split = order == PackOrder::kSplit;
    hn::StoreU(split ? hn::ConcatEven(d, high, low) : low, d, packed + block);
    hn::StoreU(split ? hn::ConcatOdd(d, high, low) : high, d, packed + block + kLanes);
  }
}

// The last, incomplete block of a weight row, zero-filled: what follows it in memory may be anything.
template <Dtype kDtype>
HWY_INLINE void load_tail(const uint8_t* bytes, int32_t count, FloatVec& first, FloatVec& second) {
  alignas(64) uint8_t block[kBlock * 4] = {};
  std::memcpy(block, bytes, static_cast<size_t>(count) * dtype_bytes(kDtype));
  load_block<kDtype>(block, first, second);
}

// sums[r * stride + o] = sum_k w[o][k] x[r][k] for kRows rows and four outputs. `ahead` (may be null)
// is what this worker reads next, four rows at the same distance as w: prefetched at the pace of reading,
// because hardware does not follow four streams that each end after a few KiB.
template <Dtype kDtype, int kRows>
HWY_INLINE void dot_direct(const uint8_t* const* w, const float* const* x, int32_t k, const uint8_t* ahead,
                           float* sums, int64_t stride) {
  const FloatTag d;
  constexpr int kBytes = static_cast<int>(kBlock * dtype_bytes(kDtype));
  const int64_t row_bytes = static_cast<int64_t>(k) * static_cast<int64_t>(dtype_bytes(kDtype));
  FloatVec acc[kRows * kGroup];
#pragma GCC unroll 32
  for (int i = 0; i < kRows * kGroup; ++i) acc[i] = hn::Zero(d);
  const int32_t whole = k / kBlock;
  for (int32_t block = 0; block < whole; ++block) {
    const int64_t at = static_cast<int64_t>(block) * kBytes;
#pragma GCC unroll 4
    for (int o = 0; o < kGroup; ++o) {
      if (ahead != nullptr) {
#pragma GCC unroll 4
        for (int line = 0; line < kBytes; line += 64) hwy::Prefetch(ahead + o * row_bytes + at + line);
      }
      FloatVec first;
      FloatVec second;
      load_block<kDtype>(w[o] + at, first, second);
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        const float* row = x[r] + static_cast<int64_t>(block) * kBlock;
        acc[r * kGroup + o] = hn::MulAdd(first, hn::LoadU(d, row), acc[r * kGroup + o]);
        acc[r * kGroup + o] = hn::MulAdd(second, hn::LoadU(d, row + kLanes), acc[r * kGroup + o]);
      }
    }
  }
  if (const int32_t rest = k - whole * kBlock; rest > 0) {
#pragma GCC unroll 4
    for (int o = 0; o < kGroup; ++o) {
      FloatVec first;
      FloatVec second;
      load_tail<kDtype>(w[o] + static_cast<int64_t>(whole) * kBytes, rest, first, second);
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        const float* row = x[r] + static_cast<int64_t>(whole) * kBlock;
        acc[r * kGroup + o] = hn::MulAdd(first, hn::LoadU(d, row), acc[r * kGroup + o]);
        acc[r * kGroup + o] = hn::MulAdd(second, hn::LoadU(d, row + kLanes), acc[r * kGroup + o]);
      }
    }
  }
  const hn::FixedTag<float, 4> d4;
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    hn::StoreU(reduce4(acc[r * kGroup], acc[r * kGroup + 1], acc[r * kGroup + 2], acc[r * kGroup + 3]), d4,
               sums + r * stride);
  }
}

// Widens `count` weight rows into groups of four, vectors of the four outputs side by side:
// [group][vector of k][4][L]. Rows that fill up the last group are zero.
template <Dtype kDtype>
HWY_INLINE void widen_tile(const uint8_t* w, int32_t count, int32_t k, float* widened) {
  const FloatTag d;
  const int64_t row_bytes = static_cast<int64_t>(k) * static_cast<int64_t>(dtype_bytes(kDtype));
  const int32_t whole = k / kBlock;
  const int64_t vectors = (k + kBlock - 1) / kBlock * 2;
  for (int32_t n = 0; n < (count + kGroup - 1) / kGroup * kGroup; ++n) {
    float* to = widened + (n / kGroup) * vectors * kGroup * kLanes + n % kGroup * kLanes;
    const uint8_t* from = w + n * row_bytes;
    FloatVec first;
    FloatVec second;
    for (int32_t block = 0; block < vectors / 2; ++block) {
      if (n >= count) {
        first = second = hn::Zero(d);
      } else if (block < whole) {
        load_block<kDtype>(from + static_cast<int64_t>(block) * kBlock * static_cast<int64_t>(dtype_bytes(kDtype)),
                           first, second);
      } else {
        load_tail<kDtype>(from + static_cast<int64_t>(block) * kBlock * static_cast<int64_t>(dtype_bytes(kDtype)),
                          k - whole * kBlock, first, second);
      }
      hn::Store(first, d, to);
      hn::Store(second, d, to + kGroup * kLanes);
      to += 2 * kGroup * kLanes;
    }
  }
}

// Goes on with the sums of kRows rows and one widened group over `vectors` vectors of k. `partial` holds the
// accumulators between slices of k; the last slice writes `sums` instead.
template <int kRows>
HWY_INLINE void dot_widened(const float* HWY_RESTRICT group, const float* const* x, int64_t vectors, bool first,
                            bool last, float* HWY_RESTRICT partial, float* HWY_RESTRICT sums, int64_t stride) {
  const FloatTag d;
  FloatVec acc[kRows * kGroup];
#pragma GCC unroll 32
  for (int i = 0; i < kRows * kGroup; ++i) acc[i] = first ? hn::Zero(d) : hn::Load(d, partial + i * kLanes);
  const float* row[kRows];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) row[r] = x[r];
  for (int64_t v = 0; v < vectors; ++v) {
    FloatVec w[kGroup];
#pragma GCC unroll 4
    for (int o = 0; o < kGroup; ++o) w[o] = hn::Load(d, group + (v * kGroup + o) * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const FloatVec value = hn::LoadU(d, row[r] + v * kLanes);
#pragma GCC unroll 4
      for (int o = 0; o < kGroup; ++o) acc[r * kGroup + o] = hn::MulAdd(w[o], value, acc[r * kGroup + o]);
    }
  }
  if (!last) {
#pragma GCC unroll 32
    for (int i = 0; i < kRows * kGroup; ++i) hn::Store(acc[i], d, partial + i * kLanes);
    return;
  }
  const hn::FixedTag<float, 4> d4;
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    hn::StoreU(reduce4(acc[r * kGroup], acc[r * kGroup + 1], acc[r * kGroup + 2], acc[r * kGroup + 3]), d4,
               sums + r * stride);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace moelora
HWY_AFTER_NAMESPACE();

#endif  // MOELORA_KERNELS_DENSE_DOT_INL_H_
