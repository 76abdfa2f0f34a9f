// SPDX-License-Identifier: Apache-2.0
// Dense products of many rows by cuBLASLt. The library is opened at run time: it is 500 MB that a host without it does
// not need, because every product also runs on our own kernels, slower for many rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>

#include "kernels/base/tensor.h"

namespace moelora {

class DenseGemm {
 public:
  // Null if the library is not installed.
  static std::unique_ptr<DenseGemm> create();
  virtual ~DenseGemm() = default;
  enum class Done { kNothing, kProduct, kProductAndBias };
  // out[t, n] (+)= sum_k W[n, k] x[t, k] + bias[n]: W and x bf16, out fp32 or bf16, fp32 accumulation; bias may be
  // empty and is left out where cuBLASLt does not take it. Nothing is done if cuBLASLt has no kernel for the product.
  // The choice of algorithm and what is done depend on the shape, the types and whether the bias is aligned alone and
  // are remembered; nothing is allocated once a shape was seen.
  [[nodiscard]] virtual Done run(const Weight& weight, const Weight& bias, const Rows& x, int32_t num_rows,
                                 const Rows& out, bool accumulate, cudaStream_t stream) = 0;
};

}  // namespace moelora
