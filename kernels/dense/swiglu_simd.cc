// SPDX-License-Identifier: Apache-2.0
// swiglu on vectors, one row an item.
#include "kernels/base/simd_targets.h"
#include "kernels/dense/swiglu.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/dense/swiglu_simd.cc"
#include "hwy/foreach_target.h"
// After foreach_target:
#include "hwy/highway.h"
#if HWY_TARGET != HWY_SCALAR
#include "kernels/dense/silu_inl.h"

HWY_BEFORE_NAMESPACE();
namespace moelora {
namespace HWY_NAMESPACE {
void swiglu_dispatch(const SwigluArgs& args, Stream& stream) {
  const Rows& out = args.out.data != nullptr ? args.out : args.gate;
  stream.parallel_for(static_cast<size_t>(args.num_rows), [&](size_t item, int) HWY_ATTR {
    const auto row = static_cast<int64_t>(item);
    activate_pairs(args.gate.row(row), args.up.row(row), args.width, out.row(row), SiluMultiply());
  });
}
}  // namespace HWY_NAMESPACE
}  // namespace moelora
HWY_AFTER_NAMESPACE();
#else
namespace moelora::HWY_NAMESPACE {
void swiglu_dispatch(const SwigluArgs& args, Stream& stream) {
  swiglu_cpu(args, stream);
}
}  // namespace moelora::HWY_NAMESPACE
#endif

#if HWY_ONCE
namespace moelora {

HWY_EXPORT(swiglu_dispatch);

void swiglu_simd(const SwigluArgs& args, Stream& stream) {
  HWY_DYNAMIC_DISPATCH(swiglu_dispatch)(args, stream);
}

}  // namespace moelora
#endif  // HWY_ONCE
