// SPDX-License-Identifier: Apache-2.0
// fill_random on CUDA: the hash of fill_random_cpu, element by element, so that both give the same bits. A thread makes
// groups of four elements of a grid-stride loop and stores each in one access; an array that is not aligned to its
// group, and the last elements, are stored one by one. Limited by memory writes.
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/vec.cuh"
#include "kernels/memory/fill_random.h"

namespace moelora {
namespace {

constexpr int THREADS = 256;
constexpr int BLOCKS_PER_SM = 8;

// The two multiply-xorshift rounds of fill_random_cpu.
__device__ __forceinline__ uint32_t mix(uint32_t value) {
  value ^= value >> 16;
  value *= 0x7feb352du;
  value ^= value >> 15;
  value *= 0x846ca68bu;
  value ^= value >> 16;
  return value;
}

__device__ __forceinline__ float random_value(uint64_t index, uint64_t seed, float scale) {
  const auto high = static_cast<uint32_t>(index >> 32);
  const uint32_t key =
      mix(static_cast<uint32_t>(seed) + 0x9e3779b9u * high) ^ mix(static_cast<uint32_t>(seed >> 32) + 0x85ebca6bu);
  const uint32_t bits = mix(static_cast<uint32_t>(index) ^ key);
  // 24 bits, so that everything before the product with `scale` is exact.
  return __fmul_rn(static_cast<float>(static_cast<int32_t>(bits) >> 8) * 0x1p-23f, scale);
}

template <class T>
__device__ __forceinline__ T rounded(float value) {
  if constexpr (sizeof(T) == 4) {
    return value;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(value);
  } else {
    return __float2bfloat16_rn(value);
  }
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    fill_kernel(T* data, uint64_t count, float scale, uint64_t seed, bool aligned) {
  const uint64_t step = uint64_t{gridDim.x} * THREADS;
  for (uint64_t group = uint64_t{blockIdx.x} * THREADS + threadIdx.x; 4 * group < count; group += step) {
    Vec4<T> values;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values.at[i] = rounded<T>(random_value(4 * group + i, seed, scale));
    }
    if (aligned && 4 * group + 4 <= count) {
      reinterpret_cast<Vec4<T>*>(data)[group] = values;
      continue;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (4 * group + i < count) {
        data[4 * group + i] = values.at[i];
      }
    }
  }
}

template <class T>
void launch(const FillRandomArgs& args, const CudaStream& state) {
  const auto count = static_cast<uint64_t>(args.count);
  const uint64_t wanted = (count + 4 * THREADS - 1) / (4 * THREADS);
  const auto most = static_cast<uint64_t>(state.num_sms) * BLOCKS_PER_SM;
  const auto blocks = static_cast<unsigned>(wanted < most ? wanted : most);
  const bool aligned = reinterpret_cast<uintptr_t>(args.data) % sizeof(Vec4<T>) == 0;
  fill_kernel<T>
      <<<blocks, THREADS, 0, state.stream>>>(static_cast<T*>(args.data), count, args.scale, args.seed, aligned);
}

}  // namespace

void fill_random_cuda(const FillRandomArgs& args, Stream& stream) {
  MOELORA_ASSERT(args.count >= 0 && reinterpret_cast<uintptr_t>(args.data) % dtype_bytes(args.dtype) == 0);
  if (args.count == 0) {
    return;
  }
  switch (args.dtype) {
    case Dtype::kF32:
      launch<float>(args, cuda_state(stream));
      break;
    case Dtype::kF16:
      launch<__half>(args, cuda_state(stream));
      break;
    case Dtype::kBf16:
      launch<__nv_bfloat16>(args, cuda_state(stream));
      break;
  }
  check_launch("fill_random");
}

}  // namespace moelora
