// SPDX-License-Identifier: Apache-2.0
// The reference linear: the formula of linear.h, one output at a time, in the contract's order of additions.
// Work is cut into blocks of outputs of one row; a block recomputes the row's shrink, which keeps blocks
// independent and costs rank / kBlock of the base product.
#include "kernels/dense/linear.h"

#include <algorithm>

#include "kernels/dense/dot_reference.h"
#include "kernels/lora/lora_reference.h"

namespace moelora {
namespace {

constexpr int32_t kBlock = 256;

void part_block(const LinearArgs& args, const LinearPart& part, int32_t t, int32_t begin, const float* x, float* out,
                float* shrunk) {
  const int32_t end = std::min(begin + kBlock, part.weight.rows);
  const LoraRow lora = lora_row_dense(args.lora, t, args.layer, part.module);
  if (lora.active()) {
    lora_shrink_reference(lora, x, args.k, shrunk);
  }
  for (int32_t n = begin; n < end; ++n) {
    float y = dot_reference(part.weight.data, part.weight.dtype, args.compute, n, x, args.k);
    y = lora_expand_reference(lora, shrunk, n, y);
    if (!part.bias.empty()) {
      y += load_element(part.bias.data, part.bias.dtype, static_cast<size_t>(n));
    }
    out[n] = args.accumulate ? out[n] + y : y;
  }
}

}  // namespace

void linear_cpu(const LinearArgs& args, Stream& stream) {
  check_lora_scratch(args.lora, stream);
  const float* const x = args.x.f32();
  for (int p = 0; p < args.num_parts; ++p) {
    const LinearPart& part = args.parts[p];
    MOELORA_ASSERT(part.weight.cols == args.k);
    float* const out = part.out.f32();
    const int32_t blocks = ceil_div(part.weight.rows, kBlock);
    const size_t count = static_cast<size_t>(args.num_rows) * static_cast<size_t>(blocks);
    stream.parallel_for(count, [&](size_t index, int worker) {
      const auto t = static_cast<int32_t>(index / static_cast<size_t>(blocks));
      const auto block = static_cast<int32_t>(index % static_cast<size_t>(blocks));
      part_block(args, part, t, block * kBlock, x + t * args.x.stride, out + t * part.out.stride,
                 reinterpret_cast<float*>(stream.scratch(worker)));
    });
  }
}

}  // namespace moelora
