// SPDX-License-Identifier: Apache-2.0
// moe_combine on CUDA: a thread owns GROUP neighbouring columns of one row and adds its K expert results in the order
// of the choices, then the shared expert's, then the residual, in fp32; the loads of several choices are in flight at
// once. A row's columns are spread over blocks, so that a few rows use many SMs. Widths and strides that fit no 16-byte
// access go column by column with the same sums. Limited by memory for many rows, by dependent loads for few.
#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/vec.cuh"
#include "kernels/moe/moe_combine.h"

namespace moelora {
namespace {

constexpr int THREADS = 128;

struct Params {
  const void* down;
  const float* weights;
  const int32_t* pair_position;
  const float* shared;       // null: none
  const float* shared_gate;  // null: 1
  float* hidden;
  int64_t down_stride;
  int64_t shared_stride;
  int64_t gate_stride;
  int64_t hidden_stride;
  int top_k;
  int width;
  int runs;  // blocks a row
};

template <class T, int GROUP>
struct alignas(GROUP * sizeof(T) > 16 ? 16 : GROUP * sizeof(T)) Group {
  T at[GROUP];
};

template <class Down, int GROUP>
__global__ void __launch_bounds__(THREADS) combine_kernel(const Params p) {
  let_next_start();
  const int64_t row = blockIdx.x / p.runs;
  const int column = (static_cast<int>(blockIdx.x % p.runs) * THREADS + threadIdx.x) * GROUP;
  wait_for_previous();
  if (column >= p.width) {
    return;
  }
  const int32_t* position = p.pair_position + row * p.top_k;
  const float* weight = p.weights + row * p.top_k;
  const Down* down = static_cast<const Down*>(p.down) + column;
  float sum[GROUP] = {};
#pragma unroll 4
  for (int j = 0; j < p.top_k; ++j) {
    const auto from = *reinterpret_cast<const Group<Down, GROUP>*>(down + position[j] * p.down_stride);
    const float w = weight[j];
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
      sum[i] = fmaf(w, to_f32(from.at[i]), sum[i]);
    }
  }
  if (p.shared != nullptr) {
    const float gate = p.shared_gate != nullptr ? 1.0f / (1.0f + expf(-p.shared_gate[row * p.gate_stride])) : 1.0f;
    const auto from = *reinterpret_cast<const Group<float, GROUP>*>(p.shared + row * p.shared_stride + column);
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
      sum[i] = fmaf(gate, from.at[i], sum[i]);
    }
  }
  auto* to = reinterpret_cast<Group<float, GROUP>*>(p.hidden + row * p.hidden_stride + column);
  Group<float, GROUP> result = *to;
#pragma unroll
  for (int i = 0; i < GROUP; ++i) {
    result.at[i] += sum[i];
  }
  *to = result;
}

bool aligned16(const void* data, int64_t stride, size_t element) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * static_cast<int64_t>(element) % 16 == 0;
}

template <class Down, int GROUP>
void launch(const MoeCombineArgs& args, const CudaStream& state) {
  const int runs = (args.width + THREADS * GROUP - 1) / (THREADS * GROUP);
  const Params params{args.down.data,
                      args.weights,
                      args.order.pair_position,
                      args.shared.data != nullptr ? args.shared.f32() : nullptr,
                      args.shared_gate.data != nullptr ? args.shared_gate.f32() : nullptr,
                      args.hidden.f32(),
                      args.down.stride,
                      args.shared.stride,
                      args.shared_gate.stride,
                      args.hidden.stride,
                      args.top_k,
                      args.width,
                      runs};
  const auto blocks = static_cast<unsigned>(int64_t{args.num_rows} * runs);
  launch_dependent(combine_kernel<Down, GROUP>, dim3(blocks), THREADS, 0, state, params);
}

template <class Down>
void launch_for_width(const MoeCombineArgs& args, const CudaStream& state) {
  constexpr int kGroup = 16 / sizeof(Down);
  const bool aligned = args.width % kGroup == 0 && aligned16(args.down.data, args.down.stride, sizeof(Down)) &&
                       aligned16(args.hidden.data, args.hidden.stride, sizeof(float)) &&
                       aligned16(args.shared.data, args.shared.stride, sizeof(float));
  if (aligned) {
    launch<Down, kGroup>(args, state);
  } else {
    launch<Down, 1>(args, state);
  }
}

}  // namespace

void moe_combine_cuda(const MoeCombineArgs& args, Stream& stream) {
  MOELORA_ASSERT(args.down.dtype != Dtype::kF16 && args.top_k >= 1);
  if (args.num_rows == 0 || args.width == 0) {
    return;
  }
  if (args.down.dtype == Dtype::kF32) {
    launch_for_width<float>(args, cuda_state(stream));
  } else {
    launch_for_width<__nv_bfloat16>(args, cuda_state(stream));
  }
  check_launch("moe_combine");
}

}  // namespace moelora
