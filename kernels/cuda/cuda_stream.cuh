// SPDX-License-Identifier: Apache-2.0
// What is behind the Stream of the CUDA backend: the queue and what ops need beside it, made once by the device
// (kernels/cuda/device_cuda.cu). Included by .cu files only.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/base/stream.h"

namespace moelora {

class DenseGemm;  // kernels/cuda/dense_gemm.cuh

struct CudaStream {
  cudaStream_t stream = nullptr;
  int num_sms = 0;
  int compute_capability = 0;       // 10 * major + minor
  DenseGemm* dense_gemm = nullptr;  // cuBLASLt; null where the library is not installed
  // Device memory, zero between kernels (kernels/cuda/counter.cuh); null on streams for copies.
  uint32_t* counters = nullptr;  // two words, of the blocks of a kernel
  uint32_t* x_ready = nullptr;   // two words: lora_shrink says to the linear behind it that x is there
  // Page-locked memory that kernels write results to and the host reads after synchronising.
  std::byte* pinned = nullptr;
  size_t pinned_bytes = 0;
  std::byte* host_scratch = nullptr;  // of the rows that the sampler takes to the host; 64-byte aligned
  size_t host_scratch_bytes = 0;
};

inline CudaStream& cuda_state(const Stream& stream) {
  return *static_cast<CudaStream*>(stream.native());
}
inline cudaStream_t cuda_stream(const Stream& stream) {
  return cuda_state(stream).stream;
}

}  // namespace moelora
