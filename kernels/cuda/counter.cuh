// SPDX-License-Identifier: Apache-2.0
// Hand-over between blocks of one kernel through memory: who has work to give counts up when it is written, who needs
// it waits for the count. Right where those who count up wait for nobody and come first: blocks with the lowest
// numbers, few enough to run at once, or those of the kernel before, all of which run or have ended when this one
// begins. The words in CudaStream are zero between kernels; the last block to leave makes them so again. Who counts up
// has passed wait_for_previous(), and who waits does so behind that, or no block of its kernel lets the next kernel
// start before it has left: several kernels that wait may run at a time, and must not see each other's counts.
#pragma once

#include <cstdint>

namespace moelora {

// By one thread after a barrier of its block: what the block wrote before is there for whoever sees the count.
__device__ __forceinline__ void count_up(uint32_t* counter, uint32_t by) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(by) : "memory");
}
// By one thread: whether the count is reached. If it is, the others of its block may read what was written after a
// barrier behind this.
__device__ __forceinline__ bool has_count(const uint32_t* counter, uint32_t count) {
  uint32_t now;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  return now >= count;
}
__device__ __forceinline__ void wait_for_count(const uint32_t* counter, uint32_t count) {
  while (!has_count(counter, count)) {
    __nanosleep(40);
  }
}
// By one thread of each block, which has waited for all it wants: counters[1] has the blocks that have left. What it
// returns goes to clear_after_last() later, so that nobody waits for it meanwhile.
__device__ __forceinline__ uint32_t leave(uint32_t* counters, uint32_t blocks) {
  return atomicInc(counters + 1, blocks - 1);  // zero after the last one
}
__device__ __forceinline__ void clear_after_last(uint32_t* counters, uint32_t left, uint32_t blocks) {
  if (left == blocks - 1) {
    atomicExch(counters, 0u);
  }
}

}  // namespace moelora
