// SPDX-License-Identifier: Apache-2.0
// swiglu on CUDA: each block takes a run of THREADS groups of four elements of one row. The exponential is the accurate
// expf, whose overflow is harmless: z / inf is the zero that silu(z) rounds to. Widths and strides that fit no group of
// four go element by element, through the same function, so an element's bits do not depend on the path. Limited by
// memory.
#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/vec.cuh"
#include "kernels/dense/swiglu.h"

namespace moelora {
namespace {

constexpr int THREADS = 128;

struct Params {
  const float* gate;
  const float* up;
  void* out;  // may be gate
  int64_t gate_stride;
  int64_t up_stride;
  int64_t out_stride;
  int width;
  int runs;  // blocks a row
};

__device__ __forceinline__ float silu_times(float z, float up) {
  return z / (1.0f + expf(-z)) * up;
}

template <class Out, bool ALIGNED>
__global__ void __launch_bounds__(THREADS) swiglu_kernel(const Params p) {
  let_next_start();
  wait_for_previous();
  const int64_t row = blockIdx.x / p.runs;
  const int first = static_cast<int>(blockIdx.x % p.runs) * THREADS;
  const float* gate = p.gate + row * p.gate_stride;
  const float* up = p.up + row * p.up_stride;
  Out* out = static_cast<Out*>(p.out) + row * p.out_stride;
  if constexpr (ALIGNED) {
    const int group = first + threadIdx.x;
    if (group < p.width / 4) {
      const Vec4<float> z = load4(gate, group);
      const Vec4<float> u = load4(up, group);
      Vec4<Out> result;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        result.at[j] = from_f32<Out>(silu_times(z.at[j], u.at[j]));
      }
      store4(out, group, result);
    }
  } else {
    for (int i = 4 * first + threadIdx.x; i < p.width && i < 4 * (first + THREADS); i += THREADS) {
      out[i] = from_f32<Out>(silu_times(gate[i], up[i]));
    }
  }
}

bool aligned4(const Rows& rows) {
  return rows.stride % 4 == 0 && reinterpret_cast<uintptr_t>(rows.data) % (4 * dtype_bytes(rows.dtype)) == 0;
}

template <class Out>
void launch(const SwigluArgs& args, const Rows& out, const CudaStream& state) {
  const int runs = (args.width + 4 * THREADS - 1) / (4 * THREADS);
  const Params params{args.gate.f32(), args.up.f32(), out.data,   args.gate.stride,
                      args.up.stride,  out.stride,    args.width, runs};
  const auto blocks = static_cast<unsigned>(int64_t{args.num_rows} * runs);
  if (args.width % 4 == 0 && aligned4(args.gate) && aligned4(args.up) && aligned4(out)) {
    launch_dependent(swiglu_kernel<Out, true>, dim3(blocks), THREADS, 0, state, params);
  } else {
    launch_dependent(swiglu_kernel<Out, false>, dim3(blocks), THREADS, 0, state, params);
  }
}

}  // namespace

void swiglu_cuda(const SwigluArgs& args, Stream& stream) {
  const Rows& out = args.out.data != nullptr ? args.out : args.gate;
  MOELORA_ASSERT(out.dtype != Dtype::kF16);
  // In place, an element must be overwritten by the thread that read it.
  MOELORA_ASSERT(out.data != args.gate.data || (out.dtype == Dtype::kF32 && out.stride == args.gate.stride));
  if (args.num_rows == 0 || args.width == 0) {
    return;
  }
  if (out.dtype == Dtype::kF32) {
    launch<float>(args, out, cuda_state(stream));
  } else {
    launch<__nv_bfloat16>(args, out, cuda_state(stream));
  }
  check_launch("swiglu");
}

}  // namespace moelora
