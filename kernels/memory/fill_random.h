// SPDX-License-Identifier: Apache-2.0
// fill_random: data[i] = scale * u_i, u_i uniform in [-1, 1), a pure function of (seed, i); for weights and adapters
// of benchmarks. Rounded to the dtype.
#pragma once

#include "kernels/base/stream.h"
#include "kernels/base/tensor.h"

namespace moelora {

struct FillRandomArgs {
  void* data = nullptr;
  Dtype dtype = Dtype::kBf16;
  int64_t count = 0;
  float scale = 0.0f;
  uint64_t seed = 0;
};

void fill_random_cpu(const FillRandomArgs& args, Stream& stream);
void fill_random_cuda(const FillRandomArgs& args, Stream& stream);  // the bits of fill_random_cpu

}  // namespace moelora
