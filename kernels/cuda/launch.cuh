// SPDX-License-Identifier: Apache-2.0
// What every launcher shares: turning a CUDA error into the project's Error, and the stream behind the void* of op
// headers, which know no CUDA type. Included by .cu files only.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "kernels/base/error.h"

namespace moelora {

inline cudaStream_t cuda_stream(void* stream) {
  return static_cast<cudaStream_t>(stream);
}

// Right after a launch: its own refusal (bad configuration, no kernel image) or an earlier sticky error.
inline void check_launch(const char* op) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw Error(Status::kCuda, std::string(op) + ": " + cudaGetErrorString(error));
  }
}

}  // namespace moelora
