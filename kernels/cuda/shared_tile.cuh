// SPDX-License-Identifier: Apache-2.0
// Tiles of bf16 in shared memory: copies that run in the background (cp.async) and loads of tensor core fragments
// (ldmatrix). Rows are cut into chunks of 16 bytes; chunk c of row r lies at place c ^ (r % 8) of its row, so that
// eight rows' chunks of one column fall into different banks.
#pragma once

#include <cstdint>

namespace moelora {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory, or 16 zero bytes: then `global` is not read.
__device__ __forceinline__ void copy_async_16(uint32_t shared, const void* global, bool read) {
  const int bytes = read ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most PENDING of the thread's committed groups are still running.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8 x 8 matrices of bf16; lane 8m + r gives the address of row r of matrix m. Lane (g, t) gets of each matrix the
// elements 2t and 2t + 1 of row g; transposed: of column g.
__device__ __forceinline__ void load_matrices(uint32_t (&m)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&m)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared)
               : "memory");
}

}  // namespace moelora
