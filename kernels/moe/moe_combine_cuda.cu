// SPDX-License-Identifier: Apache-2.0
// moe_combine on CUDA: a thread owns GROUP neighbouring columns of one row and adds its K expert results in the order
// of the choices, then the shared expert's, then the residual, in fp32; the loads of several choices are in flight at
// once. A row's columns are spread over blocks, so that a few rows use many SMs. Widths and strides that fit no 16-byte
// access go column by column with the same sums. Limited by memory for many rows, by dependent loads for few.
// With a norm of the result: one block a row that keeps its columns in registers until their squares are summed, with
// all loads of the row in flight at once; the division of the row is rms_norm's, and so are its bits. Rows that fit
// neither the vectors nor the registers take two launches.
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/vec.cuh"
#include "kernels/dense/rms_norm_row.cuh"
#include "kernels/moe/moe_combine.h"

namespace moelora {
namespace {

constexpr int THREADS = 128;
constexpr int NORM_COLUMNS = 4096;  // that a row with a norm may have in one launch

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
  // Of combine_norm_kernel:
  const void* norm_weight;
  Dtype norm_dtype;
  float norm_eps;
  void* normed;
  int64_t normed_stride;
};

template <class T, int GROUP>
struct alignas(GROUP * sizeof(T) > 16 ? 16 : GROUP * sizeof(T)) Group {
  T at[GROUP];
};

// What the shared expert's result is multiplied by.
__device__ __forceinline__ float shared_factor(const Params& p, int64_t row) {
  return p.shared_gate != nullptr ? 1.0f / (1.0f + expf(-p.shared_gate[row * p.gate_stride])) : 1.0f;
}

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
    const float gate = shared_factor(p, row);
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

__device__ __forceinline__ Vec4<float> norm_weights(const Params& p, int group) {
  Vec4<float> result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = 4 * group + i;
    result.at[i] = p.norm_dtype == Dtype::kF32   ? static_cast<const float*>(p.norm_weight)[at]
                   : p.norm_dtype == Dtype::kF16 ? to_f32(static_cast<const __half*>(p.norm_weight)[at])
                                                 : to_f32(static_cast<const __nv_bfloat16*>(p.norm_weight)[at]);
  }
  return result;
}

// Four elements as loaded: halves of a register are taken apart where they are used, else each would fill one.
__device__ __forceinline__ float4 unpack4(const float4& v) {
  return v;
}
__device__ __forceinline__ float4 unpack4(const uint2& v) {
  return {__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u), __uint_as_float(v.y << 16),
          __uint_as_float(v.y & 0xffff0000u)};
}

// Where the results of choices [first, first + BATCH) are, as far as there are, and their weights. What is loaded
// passes the L1, which may hold what the same arrays said a layer ago.
template <int BATCH>
struct Choices {
  int position[BATCH];
  float weight[BATCH];
  __device__ __forceinline__ void load(const Params& p, int64_t row, int first) {
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const bool there = first + j < p.top_k;
      position[j] = there ? __ldcg(p.pair_position + row * p.top_k + first + j) : 0;
      weight[j] = there ? __ldcg(p.weights + row * p.top_k + first + j) : 0.0f;
    }
  }
};

// sum[i] += the weighted results of choices [first, first + BATCH) in this thread's i-th group.
template <class T, int KEEP, int BATCH>
__device__ __forceinline__ void add_choices(const Params& p, const Choices<BATCH>& choices, int first,
                                            float (&sum)[KEEP][4]) {
  const int groups = p.width / 4;
  const int count = p.top_k - first;
  const T* from[BATCH];
#pragma unroll
  for (int j = 0; j < BATCH; ++j) {
    from[j] = static_cast<const T*>(p.down) + choices.position[j] * p.down_stride;
  }
  using Packed = std::conditional_t<sizeof(T) == 4, float4, uint2>;
  Packed loaded[KEEP][BATCH];
#pragma unroll
  for (int i = 0; i < KEEP; ++i) {
    const int group = static_cast<int>(threadIdx.x) + i * kNormThreads;
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      if (j < count && group < groups) {
        loaded[i][j] = reinterpret_cast<const Packed*>(from[j])[group];
      }
    }
  }
#pragma unroll
  for (int j = 0; j < BATCH; ++j) {
    if (j < count) {
#pragma unroll
      for (int i = 0; i < KEEP; ++i) {
        const float4 values = unpack4(loaded[i][j]);
        sum[i][0] = fmaf(choices.weight[j], values.x, sum[i][0]);
        sum[i][1] = fmaf(choices.weight[j], values.y, sum[i][1]);
        sum[i][2] = fmaf(choices.weight[j], values.z, sum[i][2]);
        sum[i][3] = fmaf(choices.weight[j], values.w, sum[i][3]);
      }
    }
  }
}

// One row a block, width a multiple of 4 and at most 4 * KEEP * kNormThreads, everything aligned to four elements.
// BATCH: choices whose results are asked for at once.
template <class T, int KEEP, int BATCH>
__global__ void __launch_bounds__(kNormThreads, KEEP* BATCH > 16 ? 1 : 2) combine_norm_kernel(const Params p) {
  __shared__ float partial[kNormThreads / 32];
  let_next_start();
  const int64_t row = blockIdx.x;
  const int groups = p.width / 4;
  const auto group_of = [](int i) { return static_cast<int>(threadIdx.x) + i * kNormThreads; };
  Vec4<float> weights[KEEP];  // asked for while the previous kernel still runs
#pragma unroll
  for (int i = 0; i < KEEP; ++i) {
    if (group_of(i) < groups) {
      weights[i] = norm_weights(p, group_of(i));
    }
  }
  // So are the order and what is added to: both were complete before moe_down, the kernel ahead, passed its wait.
  float* hidden = p.hidden + row * p.hidden_stride;
  Vec4<float> kept[KEEP];
#pragma unroll
  for (int i = 0; i < KEEP; ++i) {
    if (group_of(i) < groups) {
      const float4 values = __ldcg(reinterpret_cast<const float4*>(hidden) + group_of(i));
      kept[i] = {{values.x, values.y, values.z, values.w}};
    }
  }
  Choices<BATCH> choices;
  choices.load(p, row, 0);
  wait_for_previous();
  float sum[KEEP][4] = {};
  for (int first = 0; first < p.top_k; first += BATCH) {
    if (first > 0) {
      choices.load(p, row, first);
    }
    add_choices<T, KEEP, BATCH>(p, choices, first, sum);
  }
  const float gate = p.shared != nullptr ? shared_factor(p, row) : 0.0f;
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < KEEP; ++i) {
    if (group_of(i) < groups) {
      if (p.shared != nullptr) {
        const Vec4<float> shared = load4(p.shared + row * p.shared_stride, group_of(i));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sum[i][j] = fmaf(gate, shared.at[j], sum[i][j]);
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        kept[i].at[j] += sum[i][j];
      }
      store4(hidden, group_of(i), kept[i]);
      squares += square4(kept[i]);
    }
  }
  const float scale = norm_scale(squares, p.width, p.norm_eps, partial);
  T* normed = static_cast<T*>(p.normed) + row * p.normed_stride;
#pragma unroll
  for (int i = 0; i < KEEP; ++i) {
    if (group_of(i) < groups) {
      store4(normed, group_of(i), scale4<float, float, T>(kept[i], scale, weights[i]));
    }
  }
}

// Whether rows can be accessed `elements` at a time. So can those that are not there.
bool aligned(const Rows& rows, int64_t elements) {
  const auto address = reinterpret_cast<uintptr_t>(rows.data);
  return rows.stride % elements == 0 && address % (static_cast<size_t>(elements) * dtype_bytes(rows.dtype)) == 0;
}

Params params_of(const MoeCombineArgs& args, int runs) {
  return {args.down.data,
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
          runs,
          args.norm_weight.data,
          args.norm_weight.dtype,
          args.norm_eps,
          args.normed.data,
          args.normed.stride};
}

template <class Down, int GROUP>
void launch(const MoeCombineArgs& args, const CudaStream& state) {
  const int runs = (args.width + THREADS * GROUP - 1) / (THREADS * GROUP);
  const auto blocks = static_cast<unsigned>(int64_t{args.num_rows} * runs);
  launch_dependent(combine_kernel<Down, GROUP>, dim3(blocks), THREADS, 0, state, params_of(args, runs));
}

template <class Down>
void launch_for_width(const MoeCombineArgs& args, const CudaStream& state) {
  constexpr int kGroup = 16 / sizeof(Down);
  if (args.width % kGroup == 0 && aligned(args.down, kGroup) && aligned(args.hidden, 4) && aligned(args.shared, 4)) {
    launch<Down, kGroup>(args, state);
  } else {
    launch<Down, 1>(args, state);
  }
}

template <class T, int KEEP, int BATCH>
void launch_norm(const MoeCombineArgs& args, const CudaStream& state) {
  static_assert(4 * KEEP * kNormThreads <= NORM_COLUMNS);
  launch_dependent(combine_norm_kernel<T, KEEP, BATCH>, dim3(static_cast<unsigned>(args.num_rows)), kNormThreads, 0,
                   state, params_of(args, 1));
}

// Sum and norm in one launch, if such rows can have that.
bool launch_with_norm(const MoeCombineArgs& args, const CudaStream& state) {
  if (args.width % 4 != 0 || args.width > NORM_COLUMNS || args.normed.dtype != args.down.dtype ||
      !aligned(args.down, 4) || !aligned(args.hidden, 4) || !aligned(args.shared, 4) || !aligned(args.normed, 4)) {
    return false;
  }
  MOELORA_ASSERT(reinterpret_cast<uintptr_t>(args.norm_weight.data) % dtype_bytes(args.norm_weight.dtype) == 0);
  if (args.down.dtype == Dtype::kF32) {
    launch_norm<float, 4, 4>(args, state);
  } else if (args.width <= NORM_COLUMNS / 2) {
    args.top_k <= 4 ? launch_norm<__nv_bfloat16, 2, 4>(args, state) : launch_norm<__nv_bfloat16, 2, 8>(args, state);
  } else {
    args.top_k <= 4 ? launch_norm<__nv_bfloat16, 4, 4>(args, state) : launch_norm<__nv_bfloat16, 4, 8>(args, state);
  }
  return true;
}

}  // namespace

void moe_combine_cuda(const MoeCombineArgs& args, Stream& stream) {
  MOELORA_ASSERT(args.down.dtype != Dtype::kF16 && args.top_k >= 1);
  if (args.num_rows == 0 || args.width == 0) {
    return;
  }
  const bool norm = args.normed.data != nullptr;
  if (norm && launch_with_norm(args, cuda_state(stream))) {
    return check_launch("moe_combine");
  }
  if (args.down.dtype == Dtype::kF32) {
    launch_for_width<float>(args, cuda_state(stream));
  } else {
    launch_for_width<__nv_bfloat16>(args, cuda_state(stream));
  }
  check_launch("moe_combine");
  if (norm) {
    rms_norm_cuda(combine_norm(args), stream);
  }
}

}  // namespace moelora
