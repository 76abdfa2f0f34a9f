// SPDX-License-Identifier: Apache-2.0
// The barrier of a thread block cluster in its two halves, and the shared memory of its other blocks. All threads of a
// cluster's blocks that have not ended take part; warps converged. Before sm_90 there are no clusters and no launch has
// one.
#pragma once

#include <cooperative_groups.h>

namespace moelora {

// Of a thread that has written nothing that others read after the wait.
__device__ __forceinline__ void cluster_arrive_empty() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
// What was written before is seen by all after their wait.
__device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Where an object of this block's shared memory lies in block `rank` of the cluster.
template <class T>
__device__ __forceinline__ T* in_block(T* object, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return cooperative_groups::this_cluster().map_shared_rank(object, static_cast<unsigned>(rank));
#else
  return object;
#endif
}

}  // namespace moelora
