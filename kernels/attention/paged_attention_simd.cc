// SPDX-License-Identifier: Apache-2.0
// paged_attention on vectors. An item is one kv head of a few consecutive rows of a sequence: each run of 16 keys
// is read once for all of the item's (row, query head) pairs, which keep a running maximum, sum and weighted
// values in worker scratch. A pair visits its own keys in runs counted from the start of their block and does
// the same arithmetic whatever else is in the item: bits do not depend on how a prompt was cut into chunks.
#include "kernels/base/simd_targets.h"
#include "kernels/attention/paged_attention.h"

#include <algorithm>
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/paged_attention_simd.cc"
#include "hwy/foreach_target.h"
// After foreach_target:
#include "hwy/highway.h"
#if HWY_TARGET != HWY_SCALAR
#include "hwy/contrib/math/math-inl.h"
#include "kernels/base/simd_inl.h"

HWY_BEFORE_NAMESPACE();
namespace moelora {
namespace HWY_NAMESPACE {
namespace {

constexpr int32_t kRun = 16;      // keys of a run
constexpr int32_t kMaxRows = 16;  // rows of an item
constexpr float kAbsent = -1e30f; // score of a key out of sight; its exp is 0

// A run of keys of one kv head: key i of the run at k + i * D elements.
struct KeyRun {
  const std::byte* k;
  const std::byte* v;
};

// Running state of a (row, head): maximum, sum, then D weighted values.
struct State {
  float* base;
  [[nodiscard]] float& max() const { return base[0]; }
  [[nodiscard]] float& sum() const { return base[1]; }
  [[nodiscard]] float* values() const { return base + 16; }
};
constexpr int64_t state_floats(int32_t head_dim) { return 16 + (head_dim + 15) / 16 * 16; }

// Dot products of q with four keys.
template <Dtype kDtype>
HWY_INLINE void score4(const float* q, const std::byte* const* keys, int32_t head_dim, float* scores) {
  const FloatTag d;
  FloatVec acc[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
  int32_t j = 0;
  for (; j + kLanes <= head_dim; j += kLanes) {
    const FloatVec query = hn::LoadU(d, q + j);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const std::byte* at = keys[i] + j * static_cast<int32_t>(dtype_bytes(kDtype));
      acc[i] = hn::MulAdd(query, load_natural<kDtype>(at), acc[i]);
    }
  }
  if (j < head_dim) {
    const int32_t rest = head_dim - j;
    const FloatVec query = load_natural<Dtype::kF32>(reinterpret_cast<const std::byte*>(q + j), rest);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const std::byte* at = keys[i] + j * static_cast<int32_t>(dtype_bytes(kDtype));
      acc[i] = hn::MulAdd(query, load_natural<kDtype>(at, rest), acc[i]);
    }
  }
  hn::StoreU(reduce4(acc[0], acc[1], acc[2], acc[3]), hn::FixedTag<float, 4>(), scores);
}

// values[j] = values[j] * keep + sum_i weights[i] V[i][j] over `count` keys.
template <Dtype kDtype>
HWY_INLINE void add_values(const std::byte* v, const float* weights, int32_t count, float keep, int32_t head_dim,
                           float* values) {
  const FloatTag d;
  constexpr int kWide = 8;  // vectors of a row that are summed at a time
  constexpr auto kBytes = static_cast<int64_t>(dtype_bytes(kDtype));
  const FloatVec kept = hn::Set(d, keep);
  int32_t j = 0;
  for (; j + kWide * kLanes <= head_dim; j += kWide * kLanes) {
    FloatVec acc[kWide];
#pragma GCC unroll 8
    for (int c = 0; c < kWide; ++c) acc[c] = hn::Mul(kept, hn::LoadU(d, values + j + c * kLanes));
    for (int32_t i = 0; i < count; ++i) {
      const FloatVec weight = hn::Set(d, weights[i]);
      const std::byte* row = v + (static_cast<int64_t>(i) * head_dim + j) * kBytes;
#pragma GCC unroll 8
      for (int c = 0; c < kWide; ++c) {
        acc[c] = hn::MulAdd(weight, load_natural<kDtype>(row + c * kLanes * kBytes), acc[c]);
      }
    }
#pragma GCC unroll 8
    for (int c = 0; c < kWide; ++c) hn::StoreU(acc[c], d, values + j + c * kLanes);
  }
  for (; j < head_dim; j += kLanes) {
    const int32_t width = std::min(kLanes, head_dim - j);
    FloatVec acc = hn::Mul(kept, hn::LoadU(d, values + j));
    for (int32_t i = 0; i < count; ++i) {
      const std::byte* row = v + (static_cast<int64_t>(i) * head_dim + j) * kBytes;
      const FloatVec value = width == kLanes ? load_natural<kDtype>(row) : load_natural<kDtype>(row, width);
      acc = hn::MulAdd(hn::Set(d, weights[i]), value, acc);
    }
    hn::StoreU(acc, d, values + j);
  }
}

// Takes keys [low, high) of a run into the state of one (row, head).
template <Dtype kDtype>
HWY_INLINE void visit_run(const KeyRun& run, int32_t low, int32_t high, const float* q, float scale, int32_t head_dim,
                          const State& state) {
  const FloatTag d;
  const int64_t row_bytes = head_dim * static_cast<int64_t>(dtype_bytes(kDtype));
  alignas(64) float scores[kRun + 4];
  const int32_t count = high - low;
  for (int32_t i = 0; i < count; i += 4) {
    const std::byte* keys[4];
    for (int32_t c = 0; c < 4; ++c) keys[c] = run.k + (low + std::min(i + c, count - 1)) * row_bytes;
    score4<kDtype>(q, keys, head_dim, scores + i);
  }
  for (int32_t i = count; i < kRun; ++i) scores[i] = kAbsent;
  FloatVec top = hn::Set(d, state.max());
  const FloatVec factor = hn::Set(d, scale);
  for (int32_t i = 0; i < kRun; i += kLanes) {
    const FloatVec scaled = hn::Mul(factor, hn::Load(d, scores + i));
    hn::Store(scaled, d, scores + i);
    top = hn::Max(top, scaled);
  }
  for (int32_t i = count; i < kRun; ++i) scores[i] = kAbsent;
  const float max = hn::GetLane(hn::MaxOfLanes(d, top));
  FloatVec total = hn::Zero(d);
  for (int32_t i = 0; i < kRun; i += kLanes) {
    const FloatVec weight = hn::Exp(d, hn::Sub(hn::Load(d, scores + i), hn::Set(d, max)));
    hn::Store(weight, d, scores + i);
    total = hn::Add(total, weight);
  }
  const float keep = hn::GetLane(hn::Exp(d, hn::Set(d, state.max() - max)));
  state.max() = max;
  state.sum() = state.sum() * keep + reduce1(total);
  add_values<kDtype>(run.v + low * row_bytes, scores, count, keep, head_dim, state.values());
}

// One item: rows [begin, end) of the batch, all of `sequence`, and the query heads of one kv head.
struct Item {
  int32_t sequence;
  int32_t begin;
  int32_t end;
  int32_t kv_head;
};

int32_t first_position(const PagedAttentionArgs& args, int32_t row) {
  const int32_t position = args.positions[row];
  return args.window > 0 ? std::max(0, position - args.window + 1) : 0;
}

void finish(const PagedAttentionArgs& args, int32_t row, int32_t head, const State& state) {
  const FloatTag d;
  const int32_t head_dim = args.kv.layout.head_dim;
  float keep = 1.0f;
  float sum = state.sum();
  if (args.sinks != nullptr) {
    const float max = std::max(state.max(), args.sinks[head]);
    keep = std::exp(state.max() - max);
    sum = sum * keep + std::exp(args.sinks[head] - max);
  }
  const float factor = keep / sum;
  float* out = args.out.row(row) + static_cast<int64_t>(head) * head_dim;
  int32_t j = 0;
  for (; j + kLanes <= head_dim; j += kLanes) {
    hn::StoreU(hn::Mul(hn::Set(d, factor), hn::LoadU(d, state.values() + j)), d, out + j);
  }
  for (; j < head_dim; ++j) out[j] = factor * state.values()[j];
}

template <Dtype kDtype>
void run_item(const PagedAttentionArgs& args, const Item& item, std::byte* scratch) {
  const KvLayout& layout = args.kv.layout;
  const int32_t head_dim = layout.head_dim;
  const int32_t heads = args.num_heads / layout.num_kv_heads;
  const int64_t floats = state_floats(head_dim);
  auto* states = reinterpret_cast<float*>(scratch);
  const auto state_of = [&](int32_t row, int32_t h) {
    return State{states + ((row - item.begin) * static_cast<int64_t>(heads) + h) * floats};
  };
  for (int64_t i = 0; i < (item.end - item.begin) * static_cast<int64_t>(heads); ++i) {
    std::fill_n(states + i * floats, floats, 0.0f);
    states[i * floats] = kAbsent;
  }
  const int32_t last = args.positions[item.end - 1];
  const int64_t kv_bytes = static_cast<int64_t>(dtype_bytes(kDtype));
  int32_t key = first_position(args, item.begin);
  while (key <= last) {
    const int32_t block_begin = key / layout.block_tokens * layout.block_tokens;
    const int32_t run_begin = block_begin + (key - block_begin) / kRun * kRun;
    const int32_t run_end = std::min(run_begin + kRun, block_begin + layout.block_tokens);
    const std::byte* k = args.kv.block(item.sequence, key, args.layer) +
                         (static_cast<int64_t>(item.kv_head) * layout.block_tokens + run_begin - block_begin) *
                             head_dim * kv_bytes;
    const KeyRun run{k, k + args.kv.elements() * kv_bytes};
    for (int32_t row = item.begin; row < item.end; ++row) {
      const int32_t low = std::max(first_position(args, row), run_begin);
      const int32_t high = std::min(args.positions[row] + 1, run_end);
      if (low >= high) continue;
      for (int32_t h = 0; h < heads; ++h) {
        const float* q = args.q.row(row) + static_cast<int64_t>(item.kv_head * heads + h) * head_dim;
        visit_run<kDtype>(run, low - run_begin, high - run_begin, q, args.scale, head_dim, state_of(row, h));
      }
    }
    key = run_end;
  }
  for (int32_t row = item.begin; row < item.end; ++row) {
    for (int32_t h = 0; h < heads; ++h) finish(args, row, item.kv_head * heads + h, state_of(row, h));
  }
}

// Rows of an item: as many as keep the states within the worker's scratch.
int32_t item_rows(const PagedAttentionArgs& args, const Stream& stream) {
  const int64_t heads = args.num_heads / args.kv.layout.num_kv_heads;
  const int64_t bytes = heads * state_floats(args.kv.layout.head_dim) * static_cast<int64_t>(sizeof(float));
  return static_cast<int32_t>(
      std::min<int64_t>(kMaxRows, static_cast<int64_t>(stream.scratch_bytes()) / bytes));
}

}  // namespace
void attention_dispatch(const PagedAttentionArgs& args, Stream& stream) {
  const int32_t rows = item_rows(args, stream);
  MOELORA_ASSERT(rows >= 1);
  int32_t tiles = 0;
  for (int32_t s = 0; s < args.num_sequences; ++s) {
    tiles += (args.row_begin[s + 1] - args.row_begin[s] + rows - 1) / rows;
  }
  const int32_t kv_heads = args.kv.layout.num_kv_heads;
  stream.parallel_for(static_cast<size_t>(tiles) * kv_heads, [&](size_t index, int worker) HWY_ATTR {
    auto tile = static_cast<int32_t>(index) / kv_heads;
    int32_t s = 0;
    for (;; ++s) {
      const int32_t here = (args.row_begin[s + 1] - args.row_begin[s] + rows - 1) / rows;
      if (tile < here) break;
      tile -= here;
    }
    const int32_t begin = args.row_begin[s] + tile * rows;
    const Item item{s, begin, std::min(begin + rows, args.row_begin[s + 1]), static_cast<int32_t>(index) % kv_heads};
    if (args.kv.layout.dtype == Dtype::kBf16) {
      run_item<Dtype::kBf16>(args, item, stream.scratch(worker));
    } else {
      run_item<Dtype::kF32>(args, item, stream.scratch(worker));
    }
  });
}
}  // namespace HWY_NAMESPACE
}  // namespace moelora
HWY_AFTER_NAMESPACE();
#else
namespace moelora::HWY_NAMESPACE {
void attention_dispatch(const PagedAttentionArgs& args, Stream& stream) { paged_attention_cpu(args, stream); }
}  // namespace moelora::HWY_NAMESPACE
#endif

#if HWY_ONCE
namespace moelora {

HWY_EXPORT(attention_dispatch);

void paged_attention_simd(const PagedAttentionArgs& args, Stream& stream) {
  HWY_DYNAMIC_DISPATCH(attention_dispatch)(args, stream);
}

}  // namespace moelora
#endif  // HWY_ONCE
