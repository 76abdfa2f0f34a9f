// SPDX-License-Identifier: Apache-2.0
// What every launcher shares: turning a CUDA error into the project's Error. Included by .cu files only.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "kernels/base/error.h"
#include "kernels/cuda/cuda_stream.cuh"

namespace moelora {

// Errors after which the context is gone for good, so that every later call would return them again.
inline bool is_sticky(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorContained:
    case cudaErrorDeviceUninitialized:
    case cudaErrorDevicesUnavailable:
      return true;
    default:
      return false;
  }
}

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) {
    return;
  }
  cudaGetLastError();  // so that a later check does not report it again
  const Status status = is_sticky(error) ? Status::kDeviceLost : Status::kCuda;
  throw Error(status, std::string(what) + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")");
}

// Right after a launch: its own refusal (bad configuration, no kernel image) or an earlier sticky error.
inline void check_launch(const char* op) {
  check_cuda(cudaGetLastError(), op);
}

}  // namespace moelora
