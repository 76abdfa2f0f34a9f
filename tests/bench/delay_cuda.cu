// SPDX-License-Identifier: Apache-2.0
// Keeps the device busy while the host queues what is to be timed, so that launches do not show in the figures; and
// flushes what earlier work left in the L2.
#include "kernels/cuda/cuda_stream.cuh"
#include "tests/bench/delay_cuda.h"

namespace moelora {
namespace {

__global__ void wait_for(int64_t nanoseconds) {
  int64_t begin;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  int64_t now = begin;
  while (now - begin < nanoseconds) {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  }
}

}  // namespace

void delay_cuda(double milliseconds, Stream& stream) {
  wait_for<<<1, 1, 0, cuda_stream(stream)>>>(static_cast<int64_t>(milliseconds * 1e6));
}

void record_event(void* event, Stream& stream) {
  cudaEventRecord(static_cast<cudaEvent_t>(event), cuda_stream(stream));
}

}  // namespace moelora
