// SPDX-License-Identifier: Apache-2.0
// silu(g) * u on vectors, for swiglu and the tail of moe_gate_up. The exponential is Highway's polynomial, within
// about one unit in the last place over the whole range; an incomplete vector goes through the same code as a
// full one, so an element's bits do not depend on where in a row it stands.
#if defined(MOELORA_KERNELS_DENSE_SILU_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOELORA_KERNELS_DENSE_SILU_INL_H_
#undef MOELORA_KERNELS_DENSE_SILU_INL_H_
#else
#define MOELORA_KERNELS_DENSE_SILU_INL_H_
#endif

#include <algorithm>

#include "hwy/contrib/math/math-inl.h"
#include "kernels/base/simd_inl.h"

HWY_BEFORE_NAMESPACE();
namespace moelora {
namespace HWY_NAMESPACE {

HWY_INLINE FloatVec silu_multiply(FloatVec gate, FloatVec up) {
  const FloatTag d;
  // Below -87 exp(-gate) overflows; silu is then 0 to the last bit that fp32 holds of it.
  const FloatVec limited = hn::Max(gate, hn::Set(d, -87.0f));
  const FloatVec divisor = hn::Add(hn::Set(d, 1.0f), hn::Exp(d, hn::Neg(limited)));
  return hn::Mul(hn::Div(gate, divisor), up);
}

// out[j] = silu(gate[j]) * up[j]; out may be gate.
HWY_INLINE void silu_multiply(const float* gate, const float* up, int64_t count, float* out) {
  const FloatTag d;
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) {
    hn::StoreU(silu_multiply(hn::LoadU(d, gate + j), hn::LoadU(d, up + j)), d, out + j);
  }
  if (j == count) {
    return;
  }
  float buffer[3 * kLanes] = {};
  std::copy_n(gate + j, count - j, buffer);
  std::copy_n(up + j, count - j, buffer + kLanes);
  hn::StoreU(silu_multiply(hn::LoadU(d, buffer), hn::LoadU(d, buffer + kLanes)), d, buffer + 2 * kLanes);
  std::copy_n(buffer + 2 * kLanes, count - j, out + j);
}

}  // namespace HWY_NAMESPACE
}  // namespace moelora
HWY_AFTER_NAMESPACE();

#endif  // MOELORA_KERNELS_DENSE_SILU_INL_H_
