// SPDX-License-Identifier: Apache-2.0
// The reference attention: for each row and head one pass over the keys in sight, oldest first, with a running maximum
// and all sums in double. Nothing outside the visible range is touched, and the order of keys is that of their
// positions, so chunk borders cannot be seen in a result.
#include "kernels/attention/paged_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace moelora {
namespace {

// Softmax-weighted sum under construction: sum / total after the last key.
struct Accumulator {
  double* sum;  // [D]
  double largest;
  double total;
};

void add_key(Accumulator& state, double score, const std::byte* value, Dtype dtype, int64_t at, int32_t width) {
  if (score > state.largest) {
    const double shrink = std::exp(state.largest - score);
    state.largest = score;
    state.total *= shrink;
    for (int32_t d = 0; d < width; ++d) {
      state.sum[d] *= shrink;
    }
  }
  const double weight = std::exp(score - state.largest);
  state.total += weight;
  for (int32_t d = 0; d < width; ++d) {
    state.sum[d] += weight * static_cast<double>(load_element(value, dtype, static_cast<size_t>(at + d)));
  }
}

void attend(const PagedAttentionArgs& args, int32_t sequence, int32_t position, int32_t head, const float* q,
            double* sum, float* out) {
  const KvLayout& layout = args.kv.layout;
  const int32_t width = layout.head_dim;
  const int32_t kv_head = head / (args.num_heads / layout.num_kv_heads);
  const int32_t begin = args.window > 0 ? std::max(0, position - args.window + 1) : 0;
  Accumulator state{sum, -std::numeric_limits<double>::infinity(), 0.0};
  std::fill(sum, sum + width, 0.0);
  if (args.sinks != nullptr) {
    state.largest = static_cast<double>(args.sinks[head]);
    state.total = 1.0;
  }
  for (int32_t j = begin; j <= position; ++j) {
    const std::byte* block = args.kv.block(sequence, j, args.layer);
    const int64_t at = (static_cast<int64_t>(kv_head) * layout.block_tokens + j % layout.block_tokens) * width;
    double score = 0.0;
    for (int32_t d = 0; d < width; ++d) {
      score += static_cast<double>(q[d]) *
               static_cast<double>(load_element(block, layout.dtype, static_cast<size_t>(at + d)));
    }
    add_key(state, score * static_cast<double>(args.scale), block, layout.dtype, args.kv.elements() + at, width);
  }
  for (int32_t d = 0; d < width; ++d) {
    out[d] = static_cast<float>(sum[d] / state.total);
  }
}

}  // namespace

void paged_attention_cpu(const PagedAttentionArgs& args, Stream& stream) {
  if (args.rope != nullptr) {
    rope_kv_write_cpu(*args.rope, stream);
  }
  if (args.num_sequences == 0) {
    return;
  }
  const int32_t width = args.kv.layout.head_dim;
  MOELORA_ASSERT(args.num_heads % args.kv.layout.num_kv_heads == 0);
  MOELORA_ASSERT(stream.scratch_bytes() >= static_cast<size_t>(width) * sizeof(double));
  const float* const q = args.q.f32();
  float* const out = args.out.f32();
  const int32_t* const begin = args.row_begin;
  const auto heads = static_cast<size_t>(args.num_heads);
  stream.parallel_for(static_cast<size_t>(begin[args.num_sequences]) * heads, [&](size_t index, int worker) {
    const auto t = static_cast<int32_t>(index / heads);
    const auto head = static_cast<int32_t>(index % heads);
    const auto sequence = static_cast<int32_t>(std::upper_bound(begin, begin + args.num_sequences, t) - begin) - 1;
    const int64_t at = static_cast<int64_t>(head) * width;
    attend(args, sequence, args.positions[t], head, q + t * args.q.stride + at,
           reinterpret_cast<double*>(stream.scratch(worker)), out + t * args.out.stride + at);
  });
}

}  // namespace moelora
