// SPDX-License-Identifier: Apache-2.0
// silu(g) * u and gpt-oss's clamped form of it on vectors, for swiglu and the tail of moe_gate_up. The exponential is
// Highway's polynomial, within about one unit in the last place over the whole range; an incomplete vector goes
// through the same code as a full one, so an element's bits do not depend on where in a row it stands.
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

// 1 + exp(-z). Below -87 the exponential overflows; z over this is then 0 to the last bit that fp32 holds of it.
HWY_INLINE FloatVec sigmoid_divisor(FloatVec z) {
  const FloatTag d;
  return hn::Add(hn::Set(d, 1.0f), hn::Exp(d, hn::Neg(hn::Max(z, hn::Set(d, -87.0f)))));
}

struct SiluMultiply {
  HWY_INLINE FloatVec operator()(FloatVec gate, FloatVec up) const {
    return hn::Mul(hn::Div(gate, sigmoid_divisor(gate)), up);
  }
};

// (u + 1) g sigmoid(1.702 g) with g at most `limit` and u within +-limit. A NaN is no more than the limit: it stays.
struct ClampedSwiglu {
  float limit;
  HWY_INLINE FloatVec operator()(FloatVec gate, FloatVec up) const {
    const FloatTag d;
    const FloatVec most = hn::Set(d, limit);
    const FloatVec least = hn::Set(d, -limit);
    const FloatVec g = hn::IfThenElse(hn::Gt(gate, most), most, gate);
    const FloatVec below = hn::IfThenElse(hn::Gt(up, most), most, up);
    const FloatVec u = hn::IfThenElse(hn::Lt(below, least), least, below);
    const FloatVec gated = hn::Div(g, sigmoid_divisor(hn::Mul(g, hn::Set(d, 1.702f))));
    return hn::Mul(hn::Add(u, hn::Set(d, 1.0f)), gated);
  }
};

// out[j] = activation(gate[j], up[j]); out may be gate.
template <class Activation>
HWY_INLINE void activate_pairs(const float* gate, const float* up, int64_t count, float* out,
                               const Activation& activation) {
  const FloatTag d;
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) {
    hn::StoreU(activation(hn::LoadU(d, gate + j), hn::LoadU(d, up + j)), d, out + j);
  }
  if (j == count) {
    return;
  }
  float buffer[3 * kLanes] = {};
  std::copy_n(gate + j, count - j, buffer);
  std::copy_n(up + j, count - j, buffer + kLanes);
  hn::StoreU(activation(hn::LoadU(d, buffer), hn::LoadU(d, buffer + kLanes)), d, buffer + 2 * kLanes);
  std::copy_n(buffer + 2 * kLanes, count - j, out + j);
}

}  // namespace HWY_NAMESPACE
}  // namespace moelora
HWY_AFTER_NAMESPACE();

#endif  // MOELORA_KERNELS_DENSE_SILU_INL_H_
