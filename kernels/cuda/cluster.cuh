// SPDX-License-Identifier: Apache-2.0
// What blocks of a thread block cluster say to each other through shared memory, without fences of the whole GPU: a
// barrier of the cluster (release and acquire) waits for all global writes and empties the L1, so that it is for the
// beginning alone; afterwards barriers in shared memory count what arrived. Sent values are there for whoever waited
// for their bytes; an arrival at another block orders nothing else, and says that something was read. sm_90 and later;
// empty elsewhere.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "kernels/cuda/mbarrier.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define MOELORA_CLUSTERS 1
#endif

namespace moelora {

// This block's number in its cluster.
__device__ __forceinline__ int cluster_block() {
  uint32_t block = 0;
#ifdef MOELORA_CLUSTERS
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
#endif
  return static_cast<int>(block);
}

// All threads of all blocks of the cluster.
__device__ __forceinline__ void cluster_sync() {
#ifdef MOELORA_CLUSTERS
  asm volatile("barrier.cluster.arrive.release;\n barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Its halves. What this thread wrote is there for those that come back from cluster_wait().
__device__ __forceinline__ void cluster_arrive() {
#ifdef MOELORA_CLUSTERS
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
// Says only that this thread has come so far, all it read from other blocks in hand.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#ifdef MOELORA_CLUSTERS
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#ifdef MOELORA_CLUSTERS
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Where an object of this block's shared memory lies in block `rank` of the cluster.
template <class T>
__device__ __forceinline__ T* in_block(T* object, int rank) {
#ifdef MOELORA_CLUSTERS
  return cooperative_groups::this_cluster().map_shared_rank(object, static_cast<unsigned>(rank));
#else
  return object;
#endif
}

// An arrival at the same barrier (kernels/cuda/mbarrier.cuh) of another block.
__device__ __forceinline__ void mbarrier_arrive_at(uint64_t* barrier, int block) {
#ifdef MOELORA_CLUSTERS
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(block)
      : "memory");
#endif
}
// bulk_copy() to the same place of every block whose bit is set in `blocks`; the bytes count at the barrier of each.
__device__ __forceinline__ void bulk_copy_to_blocks(void* shared, const void* from, uint32_t bytes, uint64_t* barrier,
                                                    uint16_t blocks) {
#ifdef MOELORA_CLUSTERS
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;" ::"r"(shared_address(shared)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "h"(blocks)
      : "memory");
#endif
}

// In shared memory. A phase ends when all arrivals and all announced bytes are there; phase n has parity n % 2.
class ClusterBarrier {
 public:
  // By one thread; cluster_sync() before anybody uses it.
  __device__ __forceinline__ void init(int arrivals) {
#ifdef MOELORA_CLUSTERS
    mbarrier_init(&state_, arrivals);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  // An arrival of this block, and `bytes` that send() brings to its barrier in this phase.
  __device__ __forceinline__ void arrive_and_expect(int bytes) {
#ifdef MOELORA_CLUSTERS
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(own()), "r"(bytes) : "memory");
#endif
  }
  // An arrival at the same barrier of another block (or this one).
  __device__ __forceinline__ void arrive_at(int block) {
#ifdef MOELORA_CLUSTERS
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(at(own(), block)) : "memory");
#endif
  }
  // Until the phase of this parity has ended (mbarrier_wait).
  __device__ __forceinline__ void wait(uint32_t parity) { mbarrier_wait(&state_, parity); }
  // 16 or 4 bytes to the same place in the shared memory of `block`, counted by its barrier.
  __device__ __forceinline__ void send(float4* to, int block, const float4& value) {
#ifdef MOELORA_CLUSTERS
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     at(shared_address(to), block)),
                 "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(at(own(), block))
                 : "memory");
#endif
  }
  __device__ __forceinline__ void send(float* to, int block, float value) {
#ifdef MOELORA_CLUSTERS
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
                     at(shared_address(to), block)),
                 "f"(value), "r"(at(own(), block))
                 : "memory");
#endif
  }

 private:
  __device__ __forceinline__ uint32_t own() { return shared_address(&state_); }
  static __device__ __forceinline__ uint32_t at(uint32_t address, int block) {
    uint32_t result = address;
#ifdef MOELORA_CLUSTERS
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(block));
#endif
    return result;
  }
  uint64_t state_;
};

}  // namespace moelora
