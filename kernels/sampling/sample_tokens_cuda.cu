// SPDX-License-Identifier: Apache-2.0
// sample_tokens on CUDA. Greedy rows: the vocabulary is cut into chunks of a block each, whose winners go to
// page-locked memory and are joined by the host. Rows with a temperature: sample_draw.cuh. What these do not know
// (penalties, suppressed tokens, logprobs, rows they give back) is copied to the host and sampled there. Results are
// small, so the host waits once for the kernels and once for each batch of copied rows. Limited by memory for many
// rows.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cuda/launch.cuh"
#include "kernels/sampling/philox.h"
#include "kernels/sampling/sample_draw.cuh"
#include "kernels/sampling/sample_row.h"
#include "kernels/sampling/sample_tokens.h"

namespace moelora {
namespace {

constexpr int ARGMAX_THREADS = 256;
constexpr int CHUNK = 16384;                      // tokens a block
constexpr size_t RESULT_BYTES = size_t{1} << 20;  // of page-locked memory; the rest is for logits

// Best of a chunk.
struct Winner {
  float value;
  int32_t id;
  int32_t nan;  // 1: the chunk holds one
};

__device__ __forceinline__ void take_better(Winner& best, float value, int32_t id) {
  if (value > best.value || (value == best.value && id < best.id)) {
    best.value = value;
    best.id = id;
  }
}

// Grid: [rows][chunks]. `aligned`: rows begin on 16 bytes.
__global__ void __launch_bounds__(ARGMAX_THREADS)
    argmax_kernel(const float* logits, int64_t stride, int vocab, int chunks, bool aligned, Winner* winners) {
  __shared__ Winner warp_best[ARGMAX_THREADS / 32];
  const float* row = logits + blockIdx.x / chunks * stride;
  const int begin = static_cast<int>(blockIdx.x % chunks) * CHUNK;
  const int end = min(begin + CHUNK, vocab);
  Winner best{__uint_as_float(0xff800000u), INT32_MAX, 0};
  int rest = begin;  // what is not read by fours
  if (aligned) {
    rest = begin + (end - begin) / 4 * 4;
#pragma unroll 4
    for (int i = begin + 4 * static_cast<int>(threadIdx.x); i < rest; i += 4 * ARGMAX_THREADS) {
      const float4 four = *reinterpret_cast<const float4*>(row + i);
      take_better(best, four.x, i);
      take_better(best, four.y, i + 1);
      take_better(best, four.z, i + 2);
      take_better(best, four.w, i + 3);
      best.nan |= four.x != four.x || four.y != four.y || four.z != four.z || four.w != four.w ? 1 : 0;
    }
  }
#pragma unroll 4
  for (int i = rest + static_cast<int>(threadIdx.x); i < end; i += ARGMAX_THREADS) {
    take_better(best, row[i], i);
    best.nan |= row[i] != row[i] ? 1 : 0;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const float value = __shfl_xor_sync(0xffffffffu, best.value, offset);
    const int32_t id = __shfl_xor_sync(0xffffffffu, best.id, offset);
    best.nan |= __shfl_xor_sync(0xffffffffu, best.nan, offset);
    take_better(best, value, id);
  }
  if (threadIdx.x % 32 == 0) {
    warp_best[threadIdx.x / 32] = best;
  }
  __syncthreads();  // the best of all warps are there
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < ARGMAX_THREADS / 32; ++warp) {
      take_better(best, warp_best[warp].value, warp_best[warp].id);
      best.nan |= warp_best[warp].nan;
    }
    winners[blockIdx.x] = best;
  }
}

enum class Path : uint8_t { kGreedy, kDraw, kHost };

Path path_of(const SampleRow& row, int32_t vocab) {
  const bool penalised = row.token_state != nullptr && (row.repetition_penalty != 1.0f ||
                                                        row.presence_penalty != 0.0f || row.frequency_penalty != 0.0f);
  if (penalised || row.num_suppressed > 0 || row.num_top_logprobs >= 0) {
    return Path::kHost;
  }
  if (row.temperature == 0.0f) {
    return Path::kGreedy;
  }
  return vocab <= sampling::MAX_VOCAB ? Path::kDraw : Path::kHost;
}

// Page-locked memory of a call.
struct Results {
  Winner* winners;               // [rows][chunks]
  sampling::DrawRow* draw_rows;  // [rows that are drawn]
  sampling::DrawResult* drawn;
  int chunks;
};

Results lay_out(const SampleTokensArgs& args, const CudaStream& state) {
  const int chunks = (args.vocab_size + CHUNK - 1) / CHUNK;
  const auto rows = static_cast<size_t>(args.num_rows);
  const size_t draw_at = (rows * static_cast<size_t>(chunks) * sizeof(Winner) + 15) / 16 * 16;
  const size_t drawn_at = draw_at + rows * sizeof(sampling::DrawRow);
  MOELORA_ASSERT(drawn_at + rows * sizeof(sampling::DrawResult) <= RESULT_BYTES && RESULT_BYTES < state.pinned_bytes);
  return {reinterpret_cast<Winner*>(state.pinned), reinterpret_cast<sampling::DrawRow*>(state.pinned + draw_at),
          reinterpret_cast<sampling::DrawResult*>(state.pinned + drawn_at), chunks};
}

void launch_kernels(const SampleTokensArgs& args, const CudaStream& state, const Results& results) {
  int drawn = 0;
  bool greedy = false;
  for (int32_t i = 0; i < args.num_rows; ++i) {
    const SampleRow& row = args.rows[i];
    const Path path = path_of(row, args.vocab_size);
    greedy = greedy || path == Path::kGreedy;
    if (path == Path::kDraw) {
      results.draw_rows[drawn++] = {i,         row.temperature, row.top_k,
                                    row.top_p, row.min_p,       philox_uniform(row.seed, row.draw_index)};
    }
  }
  const float* logits = args.logits.f32();
  if (greedy) {
    const bool aligned = args.logits.stride % 4 == 0 && reinterpret_cast<uintptr_t>(logits) % 16 == 0;
    argmax_kernel<<<static_cast<unsigned>(args.num_rows * results.chunks), ARGMAX_THREADS, 0, state.stream>>>(
        logits, args.logits.stride, args.vocab_size, results.chunks, aligned, results.winners);
    check_launch("sample_tokens");
  }
  if (drawn > 0) {
    sampling::draw_kernel<<<static_cast<unsigned>(drawn), sampling::THREADS, 0, state.stream>>>(
        logits, args.logits.stride, args.vocab_size, results.draw_rows, results.drawn);
    check_launch("sample_tokens");
  }
}

void join_chunks(const Winner* winners, int chunks, SampleOutput& output) {
  Winner best{-std::numeric_limits<float>::infinity(), -1, 0};
  for (int chunk = 0; chunk < chunks; ++chunk) {
    best.nan |= winners[chunk].nan;
    if (winners[chunk].value > best.value) {
      best.value = winners[chunk].value;
      best.id = winners[chunk].id;
    }
  }
  const bool usable = best.nan == 0 && std::isfinite(best.value);
  output.status = usable ? 0 : 1;
  output.token = usable ? best.id : -1;
}

constexpr int32_t TO_HOST = -1;  // status of a row that is still to be sampled

// Rows marked TO_HOST, as many at a time as page-locked memory holds.
void sample_on_host(const SampleTokensArgs& args, const CudaStream& state) {
  const auto vocab = static_cast<size_t>(args.vocab_size);
  const size_t row_bytes = vocab * sizeof(float);
  const auto capacity = static_cast<int32_t>((state.pinned_bytes - RESULT_BYTES) / row_bytes);
  auto* staged = reinterpret_cast<float*>(state.pinned + RESULT_BYTES);
  for (int32_t next = 0; next < args.num_rows;) {
    const int32_t first = next;
    int32_t count = 0;
    for (; next < args.num_rows && count < capacity; ++next) {
      if (args.outputs[next].status == TO_HOST) {
        check_cuda(cudaMemcpyAsync(staged + static_cast<size_t>(count++) * vocab,
                                   args.logits.f32() + next * args.logits.stride, row_bytes, cudaMemcpyDeviceToHost,
                                   state.stream),
                   "sample_tokens");
      }
    }
    if (count == 0) {
      return;
    }
    check_cuda(cudaStreamSynchronize(state.stream), "sample_tokens");
    const float* logits = staged;
    for (int32_t i = first; i < next; ++i) {
      if (args.outputs[i].status == TO_HOST) {
        sample_row_host(args.rows[i], logits, args.vocab_size, state.host_scratch, args.outputs[i]);
        logits += vocab;
      }
    }
  }
}

}  // namespace

void sample_tokens_cuda(const SampleTokensArgs& args, Stream& stream) {
  const CudaStream& state = cuda_state(stream);
  if (args.num_rows == 0) {
    return;
  }
  const auto vocab = static_cast<size_t>(args.vocab_size);
  MOELORA_ASSERT(state.host_scratch_bytes >= sample_tokens_scratch_bytes(vocab));
  MOELORA_ASSERT(state.pinned_bytes >= RESULT_BYTES + vocab * sizeof(float));
  const Results results = lay_out(args, state);
  launch_kernels(args, state, results);
  check_cuda(cudaStreamSynchronize(state.stream), "sample_tokens");
  int drawn = 0;
  bool to_host = false;
  for (int32_t i = 0; i < args.num_rows; ++i) {
    SampleOutput& output = args.outputs[i];
    output.status = TO_HOST;
    switch (path_of(args.rows[i], args.vocab_size)) {
      case Path::kGreedy:
        join_chunks(results.winners + static_cast<int64_t>(i) * results.chunks, results.chunks, output);
        break;
      case Path::kDraw: {
        const sampling::DrawResult& result = results.drawn[drawn++];
        if (result.status != sampling::kGivenBack) {
          output.status = result.status;
          output.token = result.token;
        }
        break;
      }
      case Path::kHost:
        break;
    }
    to_host = to_host || output.status == TO_HOST;
  }
  if (to_host) {
    sample_on_host(args, state);
  }
}

}  // namespace moelora
