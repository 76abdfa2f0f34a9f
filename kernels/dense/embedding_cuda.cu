// SPDX-License-Identifier: Apache-2.0
// embedding on CUDA: each block widens a run of THREADS groups of four elements of one row, so a few rows spread over
// as many SMs as they can use. A table or an output that is not aligned to its groups goes element by element. Limited
// by memory for many rows, by the launch and two dependent loads for few.
#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/vec.cuh"
#include "kernels/dense/embedding.h"

namespace moelora {
namespace {

constexpr int THREADS = 128;

template <class T, bool ALIGNED>
__global__ void __launch_bounds__(THREADS)
    embedding_kernel(const T* table, int width, int runs, const int32_t* token_ids, float* out, int64_t out_stride) {
  const int64_t row = blockIdx.x / runs;
  const int first = static_cast<int>(blockIdx.x % runs) * THREADS;
  const T* from = table + static_cast<int64_t>(token_ids[row]) * width;
  float* to = out + row * out_stride;
  if constexpr (ALIGNED) {
    const int group = first + threadIdx.x;
    if (group < width / 4) {
      const Vec4<T> stored = load4(from, group);
      store4(to, group,
             Vec4<float>{to_f32(stored.at[0]), to_f32(stored.at[1]), to_f32(stored.at[2]), to_f32(stored.at[3])});
    }
  } else {
    for (int i = 4 * first + threadIdx.x; i < width && i < 4 * (first + THREADS); i += THREADS) {
      to[i] = to_f32(from[i]);
    }
  }
}

template <class T>
void launch(const EmbeddingArgs& args, cudaStream_t stream) {
  const auto* table = static_cast<const T*>(args.table.data);
  float* out = args.out.f32();
  const int width = args.table.cols;
  const int runs = (width + 4 * THREADS - 1) / (4 * THREADS);
  const auto blocks = static_cast<unsigned>(int64_t{args.num_rows} * runs);
  const bool aligned = width % 4 == 0 && reinterpret_cast<uintptr_t>(table) % sizeof(Vec4<T>) == 0 &&
                       args.out.stride % 4 == 0 && reinterpret_cast<uintptr_t>(out) % sizeof(Vec4<float>) == 0;
  if (aligned) {
    embedding_kernel<T, true><<<blocks, THREADS, 0, stream>>>(table, width, runs, args.token_ids, out, args.out.stride);
  } else {
    embedding_kernel<T, false>
        <<<blocks, THREADS, 0, stream>>>(table, width, runs, args.token_ids, out, args.out.stride);
  }
}

}  // namespace

void embedding_cuda(const EmbeddingArgs& args, Stream& stream) {
  MOELORA_ASSERT(reinterpret_cast<uintptr_t>(args.table.data) % dtype_bytes(args.table.dtype) == 0);
  if (args.num_rows == 0) {
    return;
  }
  switch (args.table.dtype) {
    case Dtype::kF32:
      launch<float>(args, cuda_stream(stream));
      break;
    case Dtype::kF16:
      launch<__half>(args, cuda_stream(stream));
      break;
    case Dtype::kBf16:
      launch<__nv_bfloat16>(args, cuda_stream(stream));
      break;
  }
  check_launch("embedding");
}

}  // namespace moelora
