// SPDX-License-Identifier: Apache-2.0
// Vector primitives that all fast kernels share: loads of stored weights as fp32 in pairs of vectors, and the
// one summation tree. Compiled once per instruction set (Highway's foreach_target), so it has no #pragma once.
// Invariant: the bits of a sum over lanes are the same from reduce4 in every kernel, whatever its tile shape.
#if defined(MOELORA_KERNELS_BASE_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOELORA_KERNELS_BASE_SIMD_INL_H_
#undef MOELORA_KERNELS_BASE_SIMD_INL_H_
#else
#define MOELORA_KERNELS_BASE_SIMD_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/base/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace moelora {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::CappedTag<float, 16>;
using FloatVec = hn::Vec<FloatTag>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(FloatTag()));
constexpr int kBlock = 2 * kLanes;  // elements of k that one step of a product takes

// How rows of weights are stored: elements of a Dtype, or E2M1 nibbles with an E8M0 scale for each 32 of them in a
// place of their own (kernels/moe/expert_weights.h).
enum class Stored : uint8_t { kF32, kF16, kBf16, kMxfp4 };
constexpr Stored stored_as(Dtype dtype) {
  return dtype == Dtype::kF32 ? Stored::kF32 : dtype == Dtype::kF16 ? Stored::kF16 : Stored::kBf16;
}
constexpr int64_t stored_bytes(Stored stored, int64_t elements) {
  return stored == Stored::kMxfp4 ? elements / 2 : stored == Stored::kF32 ? elements * 4 : elements * 2;
}
// The scale of element `at` of a row whose scales begin at `scales`; only MXFP4 has any.
template <Stored kStored>
constexpr const uint8_t* scale_of(const uint8_t* scales, int64_t at) {
  return kStored == Stored::kMxfp4 ? scales + at / 32 : scales;
}

// The order in which a product visits k inside a block of 2 L elements, fixed by how weights are stored.
// kSplit: even elements, then odd ones (two bf16 in 32 bits part by a shift and a mask, two nibbles of a byte
// likewise). kNatural: as stored.
enum class PackOrder : uint8_t { kSplit, kNatural };
constexpr PackOrder pack_order(Stored stored) {
  return stored == Stored::kBf16 || stored == Stored::kMxfp4 ? PackOrder::kSplit : PackOrder::kNatural;
}

// `count` scales as numbers, 2^(byte - 127), in units of what load_nibbles looks up. A byte of 255 would be a NaN and
// is refused before it gets here.
constexpr float kNibbleUnit = kLanes == 16 ? 1.0f : 0.5f;
HWY_INLINE void load_scales(const uint8_t* bytes, int64_t count, float* scales) {
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> du;
  const hn::Rebind<uint8_t, FloatTag> d8;
  const auto least = hn::Set(du, 0x00400000u);  // 2^-127 is subnormal
  if (count < kLanes) {
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = std::max(uint32_t{bytes[i]} << 23, 0x00400000u);
      std::memcpy(scales + i, &bits, sizeof bits);
      scales[i] *= kNibbleUnit;
    }
    return;
  }
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t at = std::min(i, count - kLanes);  // the last vector overlaps the one before
    const auto bits = hn::Max(hn::ShiftLeft<23>(hn::PromoteTo(du, hn::LoadU(d8, bytes + at))), least);
    hn::StoreU(hn::Mul(hn::BitCast(d, bits), hn::Set(d, kNibbleUnit)), d, scales + at);
  }
}

// The low (kHalf 0) or high nibbles of L bytes as numbers times the scale.
template <int kHalf>
HWY_INLINE FloatVec load_nibbles(const uint8_t* bytes, float scale) {
  const FloatTag d;
  const hn::Rebind<uint8_t, FloatTag> d8;
#if HWY_MAX_BYTES == 64
  // The table takes the scale: one product for a whole block. A lookup reads only the four low bits of its index.
  alignas(64) static constexpr float kNumbers[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  const hn::RebindToUnsigned<FloatTag> du;
  const auto pairs = hn::PromoteTo(du, hn::LoadU(d8, bytes));
  const auto index = kHalf == 0 ? pairs : hn::ShiftRight<4>(pairs);
  const FloatVec numbers = hn::Mul(hn::Load(d, kNumbers), hn::Set(d, scale));
  return hn::TableLookupLanes(numbers, hn::Indices512<float>{index.raw});
#else
  alignas(16) static constexpr uint8_t kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, 255, 254, 253, 252, 250, 248, 244};
  const hn::Rebind<int8_t, FloatTag> di8;
  const hn::Rebind<int32_t, FloatTag> di32;
  const auto pairs = hn::LoadU(d8, bytes);
  const auto index = kHalf == 0 ? hn::And(pairs, hn::Set(d8, uint8_t{15})) : hn::ShiftRight<4>(pairs);
  const auto doubled = hn::TableLookupBytes(hn::Load(hn::FixedTag<uint8_t, 16>(), kDoubled), index);
  const auto numbers = hn::ConvertTo(d, hn::PromoteTo(di32, hn::BitCast(di8, doubled)));
  return hn::Mul(numbers, hn::Set(d, scale));
#endif
}

// One of the two vectors of a block of stored weights, from any address: vector 0 goes with x[0 .. L) of a
// packed row's block, vector 1 with x[L .. 2 L). `scale` is for kMxfp4 only.
template <Stored kStored, int kHalf>
HWY_INLINE FloatVec load_half(const uint8_t* block, float scale) {
  const FloatTag d;
  if constexpr (kStored == Stored::kMxfp4) {
    return load_nibbles<kHalf>(block, scale);
  } else if constexpr (kStored == Stored::kBf16) {
    const hn::RebindToUnsigned<FloatTag> du;
    const hn::Repartition<uint8_t, FloatTag> d8;
    const auto pairs = hn::BitCast(du, hn::LoadU(d8, block));
    return hn::BitCast(d, kHalf == 0 ? hn::ShiftLeft<16>(pairs) : hn::And(pairs, hn::Set(du, 0xffff0000u)));
  } else if constexpr (kStored == Stored::kF16) {
    const hn::Rebind<hwy::float16_t, FloatTag> d16;
    const hn::Repartition<uint8_t, decltype(d16)> d8;
    return hn::PromoteTo(d, hn::BitCast(d16, hn::LoadU(d8, block + kHalf * 2 * kLanes)));
  } else {
    const hn::Repartition<uint8_t, FloatTag> d8;
    return hn::BitCast(d, hn::LoadU(d8, block + kHalf * 4 * kLanes));
  }
}

// L consecutive elements from any address, in order.
template <Dtype kDtype>
HWY_INLINE FloatVec load_natural(const std::byte* from) {
  const FloatTag d;
  const auto* bytes = reinterpret_cast<const uint8_t*>(from);
  if constexpr (kDtype == Dtype::kF32) {
    const hn::Repartition<uint8_t, FloatTag> d8;
    return hn::BitCast(d, hn::LoadU(d8, bytes));
  } else {
    using Narrow = std::conditional_t<kDtype == Dtype::kBf16, hwy::bfloat16_t, hwy::float16_t>;
    const hn::Rebind<Narrow, FloatTag> d16;
    const hn::Repartition<uint8_t, decltype(d16)> d8;
    return hn::PromoteTo(d, hn::BitCast(d16, hn::LoadU(d8, bytes)));
  }
}

// The first `count` < L of them; the other lanes are 0 and their memory is not read.
template <Dtype kDtype>
HWY_INLINE FloatVec load_natural(const std::byte* from, int64_t count) {
  alignas(64) std::byte block[kLanes * 4] = {};
  std::memcpy(block, from, static_cast<size_t>(count) * dtype_bytes(kDtype));
  return load_natural<kDtype>(block);
}

// Sums of the lanes of four vectors, as one vector of four. Per vector: ((l0 + l2) + (l1 + l3)) inside each
// 128-bit block, then the upper half of the blocks onto the lower until one is left.
HWY_INLINE hn::Vec<hn::FixedTag<float, 4>> reduce4(FloatVec a, FloatVec b, FloatVec c, FloatVec e) {
  const FloatTag d;
  const hn::Repartition<uint64_t, FloatTag> d64;
  const auto ab = hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  const auto ce = hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e));
  const auto low = hn::InterleaveLower(d64, hn::BitCast(d64, ab), hn::BitCast(d64, ce));
  const auto high = hn::InterleaveUpper(d64, hn::BitCast(d64, ab), hn::BitCast(d64, ce));
  const auto sum = hn::Add(hn::BitCast(d, low), hn::BitCast(d, high));
#if HWY_MAX_BYTES == 64
  const hn::Half<FloatTag> d8;
  const hn::Half<decltype(d8)> d4;
  const auto half = hn::Add(hn::LowerHalf(d8, sum), hn::UpperHalf(d8, sum));
  return hn::Add(hn::LowerHalf(d4, half), hn::UpperHalf(d4, half));
#elif HWY_MAX_BYTES == 32
  const hn::Half<FloatTag> d4;
  return hn::Add(hn::LowerHalf(d4, sum), hn::UpperHalf(d4, sum));
#else
  return sum;
#endif
}

HWY_INLINE float reduce1(FloatVec a) {
  const FloatTag d;
  const auto zero = hn::Zero(d);
  return hn::GetLane(reduce4(a, zero, zero, zero));
}

// Eight floats repeated over the lanes: vector i of a run of 8-element groups needs repeat8(values, i).
HWY_INLINE FloatVec repeat8(const float* values, int index) {
  const FloatTag d;
#if HWY_MAX_BYTES == 64
  const hn::Half<FloatTag> d8;
  const auto half = hn::LoadU(d8, values);
  return hn::Combine(d, half, half);
#else
  return hn::LoadU(d, values + (kLanes < 8 ? (index % 2) * kLanes : 0));
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace moelora
HWY_AFTER_NAMESPACE();

#endif  // MOELORA_KERNELS_BASE_SIMD_INL_H_
