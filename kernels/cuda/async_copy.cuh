// SPDX-License-Identifier: Apache-2.0
// Copies from global to shared memory that pass no register (cp.async), in groups that a thread waits for in order; and
// a copy to the L2 that nobody waits for.
#pragma once

#include <cstdint>

namespace moelora {

// 16 bytes, or 16 zero bytes if not `present`; then `from` is not read.
__device__ __forceinline__ void async_copy16(void* shared, const void* from, bool present) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(present ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void async_copy16(void* shared, const void* from) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// 4 bytes, through the L1.
__device__ __forceinline__ void async_copy4(void* shared, const void* from) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
// Starts an address's line on its way into the L2.
__device__ __forceinline__ void prefetch_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
__device__ __forceinline__ void async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Until at most N of this thread's latest groups are still on their way.
template <int N>
__device__ __forceinline__ void async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// An arrival at a barrier in shared memory (kernels/cuda/mbarrier.cuh) once all copies that this thread has started are
// there. Nothing before sm_90.
__device__ __forceinline__ void async_arrive(uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
#endif
}

// Asks `bytes` into the L2, both multiples of 16. Nothing where the GPU cannot do that.
__device__ __forceinline__ void prefetch_l2_bulk(const void* from, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

}  // namespace moelora
