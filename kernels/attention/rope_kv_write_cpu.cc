// SPDX-License-Identifier: Apache-2.0
// The rope_kv_write of every CPU backend. A row's cosines and sines are computed once, into the worker's scratch, and
// serve all of its heads; each head of q and k is then clamped, normed and rotated while it is in cache, and k
// and v go to their block. Rows are independent.
#include "kernels/attention/rope_kv_write.h"

#include <algorithm>
#include <cmath>

namespace moelora {
namespace {

struct Rotation {
  float* cosine;  // [D / 2]
  float* sine;
};

void fill_rotation(const RopeKvWriteArgs& args, int32_t position, int32_t half, const Rotation& rotation) {
  for (int32_t i = 0; i < half; ++i) {
    const float angle = static_cast<float>(position) * args.inv_freq[i];
    rotation.cosine[i] = std::cos(angle) * args.rope_scale;
    rotation.sine[i] = std::sin(angle) * args.rope_scale;
  }
}

void clamp(float* values, int32_t count, float clip) {
  if (clip <= 0.0f) {
    return;
  }
  for (int32_t i = 0; i < count; ++i) {
    // Written so that NaN stays NaN.
    if (values[i] > clip) {
      values[i] = clip;
    }
    if (values[i] < -clip) {
      values[i] = -clip;
    }
  }
}

// In double, in eight chains of a fixed order: one chain would wait for each addition.
double sum_of_squares(const float* x, int32_t width) {
  constexpr int32_t kLanes = 8;
  double lanes[kLanes] = {};
  int32_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    for (int32_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += static_cast<double>(x[i + lane]) * static_cast<double>(x[i + lane]);
    }
  }
  double sum = 0.0;
  for (; i < width; ++i) {
    sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  }
  for (const double lane : lanes) {
    sum += lane;
  }
  return sum;
}

// `weight` fp32 [width], or null: no norm.
void norm_head(float* head, int32_t width, const float* weight, float eps) {
  if (weight == nullptr) {
    return;
  }
  const auto scale =
      static_cast<float>(1.0 / std::sqrt(sum_of_squares(head, width) / width + static_cast<double>(eps)));
  for (int32_t i = 0; i < width; ++i) {
    head[i] = head[i] * scale * weight[i];
  }
}

void rotate(float* head, int32_t half, const Rotation& rotation) {
  for (int32_t i = 0; i < half; ++i) {
    const float a = head[i];
    const float b = head[i + half];
    head[i] = a * rotation.cosine[i] - b * rotation.sine[i];
    head[i + half] = b * rotation.cosine[i] + a * rotation.sine[i];
  }
}

// `to`: element `at` of an array of the KV dtype.
void store(const float* from, int32_t count, std::byte* base, int64_t at, Dtype dtype) {
  if (dtype == Dtype::kF32) {
    std::copy(from, from + count, reinterpret_cast<float*>(base) + at);
    return;
  }
  uint16_t* to = reinterpret_cast<uint16_t*>(base) + at;
  for (int32_t i = 0; i < count; ++i) {
    to[i] = f32_to_bf16(from[i]);
  }
}

// What a worker computes once a row for all of its heads, in its scratch.
struct RowScratch {
  Rotation rotation;
  const float* q_norm;  // null = none
  const float* k_norm;
};

const float* widen_weight(const Weight& weight, float* to) {
  if (weight.empty()) {
    return nullptr;
  }
  for (int32_t i = 0; i < weight.cols; ++i) {
    to[i] = load_element(weight.data, weight.dtype, static_cast<size_t>(i));
  }
  return to;
}

struct Row {
  float* q;
  float* k;
  float* v;
};

void write_row(const RopeKvWriteArgs& args, int32_t t, const Row& row, const RowScratch& scratch) {
  const KvLayout& layout = args.kv.layout;
  const int32_t width = layout.head_dim;
  const int32_t position = args.positions[t];
  fill_rotation(args, position, width / 2, scratch.rotation);
  for (int32_t h = 0; h < args.num_heads; ++h) {
    float* head = row.q + static_cast<int64_t>(h) * width;
    clamp(head, width, args.clip);
    norm_head(head, width, scratch.q_norm, args.eps);
    rotate(head, width / 2, scratch.rotation);
  }
  std::byte* const keys = args.kv.block(args.row_sequence[t], position, args.layer);
  const int64_t values = args.kv.elements();
  for (int32_t h = 0; h < layout.num_kv_heads; ++h) {
    const int64_t at = (static_cast<int64_t>(h) * layout.block_tokens + position % layout.block_tokens) * width;
    float* key = row.k + static_cast<int64_t>(h) * width;
    clamp(key, width, args.clip);
    norm_head(key, width, scratch.k_norm, args.eps);
    rotate(key, width / 2, scratch.rotation);
    store(key, width, keys, at, layout.dtype);
    float* value = row.v + static_cast<int64_t>(h) * width;
    clamp(value, width, args.clip);
    store(value, width, keys, values + at, layout.dtype);
  }
}

}  // namespace

void rope_kv_write_cpu(const RopeKvWriteArgs& args, Stream& stream) {
  const int32_t width = args.kv.layout.head_dim;
  MOELORA_ASSERT(width % 2 == 0 && args.kv.layout.dtype != Dtype::kF16);
  MOELORA_ASSERT(args.q_norm.empty() || args.q_norm.cols == width);
  MOELORA_ASSERT(args.k_norm.empty() || args.k_norm.cols == width);
  MOELORA_ASSERT(stream.scratch_bytes() >= 3 * static_cast<size_t>(width) * sizeof(float));
  float* const q = args.q.f32();
  float* const k = args.k.f32();
  float* const v = args.v.f32();
  stream.parallel_for(static_cast<size_t>(args.num_rows), [&](size_t index, int worker) {
    const auto t = static_cast<int64_t>(index);
    auto* memory = reinterpret_cast<float*>(stream.scratch(worker));
    const RowScratch scratch{{memory, memory + width / 2},
                             widen_weight(args.q_norm, memory + width),
                             widen_weight(args.k_norm, memory + 2 * width)};
    write_row(args, static_cast<int32_t>(t), {q + t * args.q.stride, k + t * args.k.stride, v + t * args.v.stride},
              scratch);
  });
}

}  // namespace moelora
