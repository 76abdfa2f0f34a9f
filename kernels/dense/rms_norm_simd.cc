// SPDX-License-Identifier: Apache-2.0
// rms_norm on vectors, one row an item. Two accumulators of squares for each row, joined in a fixed order.
#include "kernels/base/simd_targets.h"
#include "kernels/dense/rms_norm.h"

#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/dense/rms_norm_simd.cc"
#include "hwy/foreach_target.h"
// After foreach_target:
#include "hwy/highway.h"
#if HWY_TARGET != HWY_SCALAR
#include "kernels/base/simd_inl.h"

HWY_BEFORE_NAMESPACE();
namespace moelora {
namespace HWY_NAMESPACE {
namespace {

float mean_square(const float* x, int64_t width) {
  const FloatTag d;
  FloatVec first = hn::Zero(d);
  FloatVec second = hn::Zero(d);
  int64_t j = 0;
  for (; j + 2 * kLanes <= width; j += 2 * kLanes) {
    const FloatVec low = hn::LoadU(d, x + j);
    const FloatVec high = hn::LoadU(d, x + j + kLanes);
    first = hn::MulAdd(low, low, first);
    second = hn::MulAdd(high, high, second);
  }
  float sum = reduce1(hn::Add(first, second));
  for (; j < width; ++j) sum += x[j] * x[j];
  return sum / static_cast<float>(width);
}

template <Dtype kDtype>
void normalize(const float* x, const std::byte* weight, float factor, int64_t width, float* out) {
  const FloatTag d;
  const FloatVec factors = hn::Set(d, factor);
  int64_t j = 0;
  for (; j + kLanes <= width; j += kLanes) {
    const FloatVec scaled = hn::Mul(hn::LoadU(d, x + j), factors);
    hn::StoreU(hn::Mul(scaled, load_natural<kDtype>(weight + j * static_cast<int64_t>(dtype_bytes(kDtype)))), d,
               out + j);
  }
  for (; j < width; ++j) out[j] = x[j] * factor * load_element(weight, kDtype, static_cast<size_t>(j));
}

void normalize_row(const RmsNormArgs& args, int64_t t) {
  const float* x = args.x.row(args.row_index == nullptr ? t : args.row_index[t]);
  const float factor = 1.0f / std::sqrt(mean_square(x, args.width) + args.eps);
  const auto* weight = static_cast<const std::byte*>(args.weight.data);
  switch (args.weight.dtype) {
    case Dtype::kF32: return normalize<Dtype::kF32>(x, weight, factor, args.width, args.out.row(t));
    case Dtype::kF16: return normalize<Dtype::kF16>(x, weight, factor, args.width, args.out.row(t));
    case Dtype::kBf16: return normalize<Dtype::kBf16>(x, weight, factor, args.width, args.out.row(t));
  }
}

}  // namespace
void rms_norm_dispatch(const RmsNormArgs& args, Stream& stream) {
  stream.parallel_for(static_cast<size_t>(args.num_rows),
                      [&](size_t item, int) HWY_ATTR { normalize_row(args, static_cast<int64_t>(item)); });
}
}  // namespace HWY_NAMESPACE
}  // namespace moelora
HWY_AFTER_NAMESPACE();
#else
namespace moelora::HWY_NAMESPACE {
void rms_norm_dispatch(const RmsNormArgs& args, Stream& stream) { rms_norm_cpu(args, stream); }
}  // namespace moelora::HWY_NAMESPACE
#endif

#if HWY_ONCE
namespace moelora {

HWY_EXPORT(rms_norm_dispatch);

void rms_norm_simd(const RmsNormArgs& args, Stream& stream) { HWY_DYNAMIC_DISPATCH(rms_norm_dispatch)(args, stream); }

}  // namespace moelora
#endif  // HWY_ONCE
