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

// The order in which a product visits k inside a block of 2 L elements, fixed by the weights' dtype.
// kSplit: even elements, then odd ones (two bf16 in 32 bits part by a shift and a mask). kNatural: as stored.
enum class PackOrder : uint8_t { kSplit, kNatural };
constexpr PackOrder pack_order(Dtype dtype) {
  return dtype == Dtype::kBf16 ? PackOrder::kSplit : PackOrder::kNatural;
}

// One of the two vectors of a block of stored weights, from any address: vector 0 goes with x[0 .. L) of a
// packed row's block, vector 1 with x[L .. 2 L).
template <Dtype kDtype, int kHalf>
HWY_INLINE FloatVec load_half(const uint8_t* block) {
  const FloatTag d;
  if constexpr (kDtype == Dtype::kBf16) {
    const hn::RebindToUnsigned<FloatTag> du;
    const hn::Repartition<uint8_t, FloatTag> d8;
    const auto pairs = hn::BitCast(du, hn::LoadU(d8, block));
    return hn::BitCast(d, kHalf == 0 ? hn::ShiftLeft<16>(pairs) : hn::And(pairs, hn::Set(du, 0xffff0000u)));
  } else if constexpr (kDtype == Dtype::kF16) {
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
