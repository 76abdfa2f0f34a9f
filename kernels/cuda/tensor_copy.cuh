// SPDX-License-Identifier: Apache-2.0
// Copies of boxes of a bf16 matrix from global to shared memory by the tensor memory accelerator
// (cp.async.bulk.tensor): one thread asks for a whole box, and a barrier in shared memory counts its bytes. A box is 64
// columns, 128 bytes a row, swizzled as wgmma reads it (kernels/cuda/wgmma.cuh); what lies outside of the matrix
// becomes zeros and is not read. A map describes the matrix; it is made on the host and passed to the kernel as a
// __grid_constant__ parameter. sm_90 and later; empty elsewhere.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/mbarrier.cuh"

namespace moelora {

// --- Host.

constexpr int kBoxColumns = 64;

// Of a row-major matrix whose rows are `stride` elements apart, a multiple of 8, at a multiple of 16 bytes, in boxes of
// `box_rows` (at most 256) rows. False where the driver cannot do that.
inline bool make_tensor_map(CUtensorMap& map, const void* data, int64_t rows, int64_t columns, int64_t stride,
                            int box_rows) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
      cudaGetLastError();  // so that the next check of a launch does not find it
      function = nullptr;
    }
    return reinterpret_cast<Encode>(function);
  }();
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride) * 2};
  const cuuint32_t box[2] = {kBoxColumns, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  return encode != nullptr &&
         encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// --- Device.

// The box whose first element is (row, column), to a multiple of 1 KiB of shared memory.
__device__ __forceinline__ void copy_box(uint32_t shared, const CUtensorMap& map, int column, int row,
                                         uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
#endif
}
// The same box into the L2.
__device__ __forceinline__ void prefetch_box(const CUtensorMap& map, int column, int row) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(reinterpret_cast<uint64_t>(&map)),
      "r"(column), "r"(row)
      : "memory");
#endif
}
// What this thread has seen in global memory is there for copies that it asks for afterwards.
__device__ __forceinline__ void fence_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}
// The map itself, into the cache of the copies.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
#endif
}

}  // namespace moelora
