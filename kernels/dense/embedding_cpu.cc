// SPDX-License-Identifier: Apache-2.0
// The embedding of every CPU backend: one pass that reads each needed row of the table once and widens it.
// Called first in a step. Rows are independent, so the stream hands them out one by one.
#include "kernels/dense/embedding.h"

#include <cstring>

namespace moelora {
namespace {

void widen_bf16(const char* bytes, int32_t count, float* out) {
  for (int32_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, bytes + 2 * static_cast<int64_t>(i), sizeof bits);
    out[i] = bf16_to_f32(bits);
  }
}

}  // namespace

void embedding_cpu(const EmbeddingArgs& args, Stream& stream) {
  float* const out = args.out.f32();
  const int32_t width = args.table.cols;
  const Dtype dtype = args.table.dtype;
  const int64_t row_bytes = width * static_cast<int64_t>(dtype_bytes(dtype));
  stream.parallel_for(static_cast<size_t>(args.num_rows), [&](size_t t, int) {
    const char* from = static_cast<const char*>(args.table.data) + args.token_ids[t] * row_bytes;
    float* to = out + static_cast<int64_t>(t) * args.out.stride;
    switch (dtype) {
      case Dtype::kF32:
        std::memcpy(to, from, static_cast<size_t>(row_bytes));
        break;
      case Dtype::kBf16:
        widen_bf16(from, width, to);
        break;
      case Dtype::kF16:
        for (int32_t i = 0; i < width; ++i) {
          to[i] = load_element(from, dtype, static_cast<size_t>(i));
        }
        break;
    }
  });
}

}  // namespace moelora
