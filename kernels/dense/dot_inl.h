// SPDX-License-Identifier: Apache-2.0
// Products of stored weight rows with packed activation rows: the microkernels under linear, moe_gate_up and
// moe_down for up to some hundred rows. dot_stored widens weights to fp32 in registers (few rows: the weights come
// from memory once and bandwidth is the limit), dot_widened reads a tile that dot_stored left in fp32 when it did
// the first rows. Each (row, output) is summed in the order that kSlice tells, which outer_inl.h reproduces for
// very many rows: a row's bits do not depend on which of the three ran, nor on how many rows ran with it.
#if defined(MOELORA_KERNELS_DENSE_DOT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOELORA_KERNELS_DENSE_DOT_INL_H_
#undef MOELORA_KERNELS_DENSE_DOT_INL_H_
#else
#define MOELORA_KERNELS_DENSE_DOT_INL_H_
#endif

#include <algorithm>

#include "kernels/base/simd_inl.h"
#include "kernels/base/tensor.h"

HWY_BEFORE_NAMESPACE();
namespace moelora {
namespace HWY_NAMESPACE {

constexpr int kGroup = 4;                     // outputs of a microkernel
constexpr int kPanel = kLanes == 16 ? 6 : 3;  // rows of a microkernel: 24 (12) accumulators

constexpr int64_t padded_k(int64_t k) {
  return (k + 63) / 64 * 64;
}

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
      for (int64_t i = 0; block + i < k; ++i) {
        rest[i] = x[block + i];
      }
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

// k is cut into slices of 1024: a slice's products are summed in the lanes of one accumulator for each (row,
// output), reduce4 makes a number of it, and the numbers are added in the order of the slices.
constexpr int64_t kSlice = 1024;

// Scales of a slice of a row.
template <Stored kStored>
constexpr int64_t kScales = kStored == Stored::kMxfp4 ? kSlice / 32 : 0;

// Where the sums of four outputs go: sums[r * stride + o]. first: nothing is there yet.
struct Sums {
  bool first;
  float* sums;
  int64_t stride;
};

template <int kRows>
HWY_INLINE void clear(FloatVec* acc) {
  const FloatTag d;
#pragma GCC unroll 32
  for (int i = 0; i < kRows * kGroup; ++i) {
    acc[i] = hn::Zero(d);
  }
}

template <int kRows>
HWY_INLINE void add_slice(const FloatVec* acc, const Sums& to) {
  const hn::FixedTag<float, 4> d4;
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    float* at = to.sums + r * to.stride;
    const auto sum = reduce4(acc[r * kGroup], acc[r * kGroup + 1], acc[r * kGroup + 2], acc[r * kGroup + 3]);
    hn::StoreU(to.first ? sum : hn::Add(hn::LoadU(d4, at), sum), d4, at);
  }
}

// Stored weight rows `stride` bytes apart (0: the same row again), with their scales where they have any.
struct StoredRows {
  const uint8_t* first = nullptr;
  int64_t stride = 0;
  const uint8_t* scales = nullptr;
  int64_t scale_stride = 0;

  // The same rows from row `row`, element `at` on.
  template <Stored kStored>
  [[nodiscard]] HWY_INLINE StoredRows from(int64_t row, int64_t at) const {
    return {first + row * stride + stored_bytes(kStored, at), stride,
            scale_of<kStored>(scales + row * scale_stride, at), scale_stride};
  }
};

// acc[r][o] += the products of one of the two vectors of a block, rows of x at element `at`; row o's scale is
// scales[o * kScales] (without scales: of no meaning).
template <Stored kStored, int kRows, int kHalf, bool kWiden>
HWY_INLINE void multiply_half(const StoredRows& block, const float* scales, const float* const* x, int64_t at,
                              float* widened, FloatVec* acc) {
  const FloatTag d;
  FloatVec weights[kGroup];
#pragma GCC unroll 4
  for (int o = 0; o < kGroup; ++o) {
    weights[o] = load_half<kStored, kHalf>(block.first + o * block.stride, scales[o * kScales<kStored>]);
    if constexpr (kWiden) {
      hn::Store(weights[o], d, widened + (kHalf * kGroup + o) * kLanes);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    const FloatVec value = hn::LoadU(d, x[r] + at + kHalf * kLanes);
#pragma GCC unroll 4
    for (int o = 0; o < kGroup; ++o) {
      acc[r * kGroup + o] = hn::MulAdd(weights[o], value, acc[r * kGroup + o]);
    }
  }
}

// What a run over four stored weight rows prefetches at the pace of reading: hardware does not follow four
// streams that each end after a few KiB. kNear blocks ahead (at the end of the rows: the rows that follow) into
// L1, and the rows that follow, at the same distance as these, into L2; a panel that shares the weights with
// another takes only two of the four rows that follow, so that memory is busy in both.
struct ReadAhead {
  const uint8_t* following = nullptr;
  const uint8_t* following_scales = nullptr;
  bool near = false;
  bool four = false;
};
template <Stored kStored>
constexpr int64_t kNear = kStored == Stored::kMxfp4 ? 1024 / kBlock : 8;

template <int64_t kBytes>
HWY_INLINE void read_ahead(const ReadAhead& ahead, int64_t stride, const uint8_t* near, const uint8_t* following) {
  if (ahead.near) {
#pragma GCC unroll 4
    for (int o = 0; o < kGroup; ++o) {
#pragma GCC unroll 4
      for (int64_t line = 0; line < kBytes; line += 64) {
        __builtin_prefetch(near + o * stride + line, 0, 3);
      }
    }
  }
#pragma GCC unroll 4
  for (int o = 0; o < kGroup; ++o) {
    if (o == 2 && !ahead.four) {
      break;
    }
#pragma GCC unroll 4
    for (int64_t line = 0; line < kBytes; line += 64) {
      __builtin_prefetch(following + o * stride + line, 0, 2);
    }
  }
}

// Products of four stored weight rows with kRows rows over the elements [0, count) of k, a whole row or, with
// kWiden, one slice of it, which then also leaves the weights in `widened` for dot_widened.
template <Stored kStored, int kRows, bool kWiden>
HWY_INLINE void dot_stored(StoredRows block, const float* const* rows, int64_t count, const ReadAhead& ahead,
                           float* widened, Sums to) {
  constexpr int64_t kBytes = stored_bytes(kStored, kBlock);
  const int64_t row_bytes = stored_bytes(kStored, count);
  const float* x[kRows];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    x[r] = rows[r];
  }
  const uint8_t* following = ahead.following;
  if constexpr (kStored == Stored::kMxfp4 && !kWiden) {
    for (int64_t byte = 0; ahead.near && byte < kGroup * block.scale_stride; byte += 64) {
      __builtin_prefetch(ahead.following_scales + byte, 0, 2);
    }
  }
  int64_t at = 0;
  while (at < count) {
    const int64_t begin = at;
    const int64_t end = std::min(count, at + kSlice);
    alignas(64) float scales[kGroup * kScales<kStored> + 1];  // at least one, as arrays must have
    scales[0] = 1.0f;
    if constexpr (kStored == Stored::kMxfp4) {
      for (int o = 0; o < kGroup; ++o) {
        load_scales(block.scales + o * block.scale_stride + at / 32, (end - at) / 32, scales + o * kScales<kStored>);
      }
    }
    FloatVec acc[kRows * kGroup];
    clear<kRows>(acc);
    for (; at + kBlock <= end; at += kBlock) {
      if (!kWiden && (kBytes >= 64 || at * kBytes / kBlock % 64 == 0)) {  // once a line
        constexpr int64_t kAhead = kNear<kStored> * kBytes;
        const bool inside = at + kNear<kStored> * kBlock < count;
        const uint8_t* near = inside ? block.first + kAhead : following + (kAhead - row_bytes);
        read_ahead<kBytes>(ahead, block.stride, near, following);
      }
      const float* scale = scales + (kStored == Stored::kMxfp4 ? (at - begin) / 32 : 0);
      multiply_half<kStored, kRows, 0, kWiden>(block, scale, x, at, widened, acc);
      multiply_half<kStored, kRows, 1, kWiden>(block, scale, x, at, widened, acc);
      block.first += kBytes;
      following += kBytes;
      if constexpr (kWiden) {
        widened += 2 * kGroup * kLanes;
      }
    }
    if (at < end) {  // what follows the row in memory may be anything: zeros instead
      alignas(64) uint8_t rest[kGroup][kBlock * 4] = {};
      for (int o = 0; o < kGroup; ++o) {
        std::memcpy(rest[o], block.first + o * block.stride, static_cast<size_t>(stored_bytes(kStored, end - at)));
      }
      const StoredRows padded{rest[0], sizeof rest[0]};
      const float* scale = scales + (kStored == Stored::kMxfp4 ? (at - begin) / 32 : 0);
      multiply_half<kStored, kRows, 0, kWiden>(padded, scale, x, at, widened, acc);
      multiply_half<kStored, kRows, 1, kWiden>(padded, scale, x, at, widened, acc);
      at = end;
    }
    add_slice<kRows>(acc, to);
    to.first = false;
  }
}

// The same over one slice of `vectors` vectors of four widened rows: [vector of k][4][L].
template <int kRows>
HWY_INLINE void dot_widened(const float* HWY_RESTRICT group, const float* const* rows, int64_t vectors,
                            const Sums& to) {
  const FloatTag d;
  FloatVec acc[kRows * kGroup];
  clear<kRows>(acc);
  const float* x[kRows];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    x[r] = rows[r];
  }
  for (int64_t pair = 0; pair < vectors; pair += 2) {  // vectors come in pairs; unrolled for the loop's own cost
#pragma GCC unroll 2
    for (int64_t v = pair; v < pair + 2; ++v) {
      FloatVec w[kGroup];
#pragma GCC unroll 4
      for (int o = 0; o < kGroup; ++o) {
        w[o] = hn::Load(d, group + (v * kGroup + o) * kLanes);
      }
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        const FloatVec value = hn::LoadU(d, x[r] + v * kLanes);
#pragma GCC unroll 4
        for (int o = 0; o < kGroup; ++o) {
          acc[r * kGroup + o] = hn::MulAdd(w[o], value, acc[r * kGroup + o]);
        }
      }
    }
  }
  add_slice<kRows>(acc, to);
}

}  // namespace HWY_NAMESPACE
}  // namespace moelora
HWY_AFTER_NAMESPACE();

#endif  // MOELORA_KERNELS_DENSE_DOT_INL_H_
