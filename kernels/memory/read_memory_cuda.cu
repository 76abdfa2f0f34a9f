// SPDX-License-Identifier: Apache-2.0
// read_memory on CUDA: a persistent grid whose threads keep UNROLL 16-byte loads in flight; tiles of the array go round
// the blocks, so that at any time the whole grid reads one region. Each block leaves its sum in page-locked memory and
// the host adds them: sums of integers, so the order of blocks cannot be seen. Limited by memory, which is what it is
// there to measure.
#include <algorithm>
#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma_tile.cuh"
#include "kernels/memory/read_memory.h"

namespace moelora {
namespace {

constexpr int THREADS = 512;
constexpr int UNROLL = 8;
constexpr int BLOCKS_PER_SM = 2;
constexpr int64_t TILE = THREADS * UNROLL;  // units of 16 bytes

__device__ __forceinline__ uint64_t word_sum(const uint4& unit) {
  return (uint64_t{unit.y} << 32) + unit.x + (uint64_t{unit.w} << 32) + unit.z;
}

__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    read_kernel(const uint4* data, int64_t words, uint64_t* block_sums) {
  __shared__ uint64_t partial[THREADS / 32];
  const int64_t units = words / 2;
  const int64_t whole = units / TILE * TILE;
  uint64_t sum = 0;
  for (int64_t tile = blockIdx.x * TILE; tile < whole; tile += gridDim.x * TILE) {
    uint4 kept[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      kept[i] = load_streaming(data + tile + i * THREADS + threadIdx.x);
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      sum += word_sum(kept[i]);
    }
  }
  if (blockIdx.x == 0) {
    for (int64_t at = whole + threadIdx.x; at < units; at += THREADS) {
      sum += word_sum(load_streaming(data + at));
    }
    if (threadIdx.x == 0 && words % 2 != 0) {
      sum += reinterpret_cast<const uint64_t*>(data)[words - 1];
    }
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
  if (threadIdx.x % 32 == 0) {
    partial[threadIdx.x / 32] = sum;
  }
  __syncthreads();  // the sums of all warps are there
  if (threadIdx.x == 0) {
    uint64_t total = 0;
    for (int warp = 0; warp < THREADS / 32; ++warp) {
      total += partial[warp];
    }
    block_sums[blockIdx.x] = total;
  }
}

}  // namespace

void read_memory_cuda(const ReadMemoryArgs& args, Stream& stream) {
  const CudaStream& state = cuda_state(stream);
  MOELORA_ASSERT(reinterpret_cast<uintptr_t>(args.data) % 16 == 0);
  uint64_t total = 0;
  const auto words = static_cast<int64_t>(args.bytes / 8);
  if (words > 0) {
    const int64_t tiles = std::max<int64_t>(words / 2 / TILE, 1);
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(tiles, int64_t{state.num_sms} * BLOCKS_PER_SM));
    MOELORA_ASSERT(blocks * sizeof(uint64_t) <= state.pinned_bytes);
    auto* sums = reinterpret_cast<uint64_t*>(state.pinned);
    read_kernel<<<blocks, THREADS, 0, state.stream>>>(reinterpret_cast<const uint4*>(args.data), words, sums);
    check_launch("read_memory");
    check_cuda(cudaStreamSynchronize(state.stream), "read_memory");
    for (unsigned block = 0; block < blocks; ++block) {
      total += sums[block];
    }
  }
  if (args.sum != nullptr) {
    *args.sum = total;
  }
}

}  // namespace moelora
