// SPDX-License-Identifier: Apache-2.0
// What every launcher shares: turning a CUDA error into the project's Error, and launches that overlap the kernel
// before them. Included by .cu files only.
//
// Dependent launches. A kernel of launch_dependent() may begin while the kernel before it on the stream still runs,
// once all of that one's blocks have called let_next_start() or ended. The rules that keep this right:
//   - Every such kernel calls wait_for_previous() in all of its blocks, before it reads what earlier kernels wrote and
//     before it writes anything. Then the end of a kernel means that all older ones have ended, too.
//   - A kernel may read before its wait only what was complete before the kernel ahead of it passed its own wait, if
//     that one passes its wait before it calls let_next_start(). An op that relies on another op for that says so at
//     its arguments (moe_down.h, moe_combine.h). Otherwise it must be told by a kernel that has passed its wait
//     (kernels/cuda/counter.cuh): several kernels that have let the next one start and wait may be there at a time.
//   - What was complete before the first kernel of a step, which is a plain launch, can always be read: what the host
//     wrote or copied (weights, positions, block tables), adapters and their records, K and V of earlier steps.
// Kernels of plain launches wait for the end of everything older.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
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

// A launch on the stream as <<<grid, block, shared>>>, dependent where the GPU can do that, in clusters of `cluster`
// blocks if not 0 (compute capability 9.0 on).
template <class... Parameters, class... Args>
void launch_dependent_clusters(void (*kernel)(Parameters...), dim3 grid, unsigned cluster, unsigned block,
                               size_t shared, const CudaStream& state, const Args&... args) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster;
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared;
  config.stream = state.stream;
  config.attrs = attributes;
  config.numAttrs = state.compute_capability < 90 ? 0 : (cluster == 0 ? 1 : 2);
  cudaLaunchKernelEx(&config, kernel, Parameters(args)...);  // check_launch() finds its error
}
template <class... Parameters, class... Args>
void launch_dependent(void (*kernel)(Parameters...), dim3 grid, unsigned block, size_t shared, const CudaStream& state,
                      const Args&... args) {
  launch_dependent_clusters(kernel, grid, 0, block, shared, state, args...);
}

// How many percent of an SM's L1 shall be shared memory while `kernel` runs there. An SM changes that split only when
// it is empty, so that neighbours on the stream overlap where their splits are the same, or where a change is not
// needed.
template <class... Parameters>
void prefer_shared(void (*kernel)(Parameters...), int percent) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, percent),
             "split of the L1 and shared memory");
}

// Whether the code of `kernel` that would run here has a body: it may be compiled for other architectures too, where it
// is empty, hence without the shared memory that it declares.
template <class Kernel>
bool has_code(Kernel kernel) {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess && attributes.sharedSizeBytes > 0;
}

// Until everything that earlier kernels of the stream did is done and visible.
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel's blocks may come as soon as all blocks of this one have said so.
__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace moelora
