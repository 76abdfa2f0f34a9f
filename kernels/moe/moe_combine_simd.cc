// SPDX-License-Identifier: Apache-2.0
// moe_combine on vectors, one (row, run of columns) an item; the run bounds the sums kept on the stack.
#include "kernels/base/simd_targets.h"
#include "kernels/moe/moe_combine.h"

#include <algorithm>
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/moe/moe_combine_simd.cc"
#include "hwy/foreach_target.h"
// After foreach_target:
#include "hwy/highway.h"
#if HWY_TARGET != HWY_SCALAR
#include "kernels/base/simd_inl.h"

HWY_BEFORE_NAMESPACE();
namespace moelora {
namespace HWY_NAMESPACE {
namespace {

constexpr int32_t kColumns = 4096;  // of an item

// to[j] += scale * from[j]
HWY_INLINE void add_scaled(const float* from, float scale, int32_t count, float* to) {
  const FloatTag d;
  const FloatVec factor = hn::Set(d, scale);
  int32_t j = 0;
  for (; j + kLanes <= count; j += kLanes) {
    hn::StoreU(hn::MulAdd(factor, hn::LoadU(d, from + j), hn::LoadU(d, to + j)), d, to + j);
  }
  for (; j < count; ++j) {
    to[j] += scale * from[j];
  }
}

void combine(const MoeCombineArgs& args, int64_t t, int32_t begin, int32_t count) {
  float sum[kColumns] = {};
  for (int32_t j = 0; j < args.top_k; ++j) {
    const int64_t pair = t * args.top_k + j;
    add_scaled(args.down.row(args.order.pair_position[pair]) + begin, args.weights[pair], count, sum);
  }
  if (args.shared.data != nullptr) {
    const float gate = args.shared_gate.data == nullptr ? 1.0f : 1.0f / (1.0f + std::exp(-args.shared_gate.row(t)[0]));
    add_scaled(args.shared.row(t) + begin, gate, count, sum);
  }
  add_scaled(sum, 1.0f, count, args.hidden.row(t) + begin);
}

}  // namespace
void combine_dispatch(const MoeCombineArgs& args, Stream& stream) {
  const size_t runs = static_cast<size_t>((args.width + kColumns - 1) / kColumns);
  stream.parallel_for(static_cast<size_t>(args.num_rows) * runs, [&](size_t item, int) HWY_ATTR {
    const auto begin = static_cast<int32_t>(item % runs) * kColumns;
    combine(args, static_cast<int64_t>(item / runs), begin, std::min(kColumns, args.width - begin));
  });
}
}  // namespace HWY_NAMESPACE
}  // namespace moelora
HWY_AFTER_NAMESPACE();
#else
namespace moelora::HWY_NAMESPACE {
void combine_dispatch(const MoeCombineArgs& args, Stream& stream) {
  moe_combine_cpu(args, stream);
}
}  // namespace moelora::HWY_NAMESPACE
#endif

#if HWY_ONCE
namespace moelora {

HWY_EXPORT(combine_dispatch);

void moe_combine_simd(const MoeCombineArgs& args, Stream& stream) {
  MoeCombineArgs sums = args;
  sums.normed = {};
  HWY_DYNAMIC_DISPATCH(combine_dispatch)(sums, stream);
  if (args.normed.data != nullptr) {
    rms_norm_simd(combine_norm(args), stream);
  }
}

}  // namespace moelora
#endif  // HWY_ONCE
