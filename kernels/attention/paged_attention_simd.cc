// SPDX-License-Identifier: Apache-2.0
// paged_attention on vectors. An item is one kv head of a few consecutive rows of a sequence: each run of 16 keys
// is read once for all of the item's (row, query head) pairs, which keep a running maximum, sum and weighted
// values in worker scratch. A pair visits its own keys in runs counted from the start of their block and does
// the same arithmetic whatever else is in the item: bits do not depend on how a prompt was cut into chunks.
#include "kernels/attention/paged_attention.h"
#include "kernels/base/simd_targets.h"

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

constexpr int32_t kRun = 16;       // keys of a run
constexpr int32_t kMaxRows = 16;   // rows of an item
constexpr int32_t kWaiting = 16;   // (row, head) pairs that visit a run together
constexpr float kAbsent = -1e30f;  // score of a key out of sight; its exp is 0

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
constexpr int64_t state_floats(int32_t head_dim) {
  return 16 + (head_dim + 15) / 16 * 16;
}

// One (row, query head): where its q lies and what it has seen.
struct Query {
  const float* q;
  State state;
};

// scores[i][c] = q_i . key_c for kQueries queries and four keys.
template <Dtype kDtype, int kQueries>
HWY_INLINE void score4(const Query* queries, const std::byte* const* keys, int32_t head_dim, float* scores) {
  const FloatTag d;
  constexpr auto kBytes = static_cast<int32_t>(dtype_bytes(kDtype));
  FloatVec acc[kQueries * 4];
#pragma GCC unroll 16
  for (int i = 0; i < kQueries * 4; ++i) {
    acc[i] = hn::Zero(d);
  }
  for (int32_t j = 0; j < head_dim; j += kLanes) {
    const int32_t rest = head_dim - j;
    FloatVec key[4];
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      const std::byte* at = keys[c] + j * kBytes;
      key[c] = rest >= kLanes ? load_natural<kDtype>(at) : load_natural<kDtype>(at, rest);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kQueries; ++i) {
      const auto* at = reinterpret_cast<const std::byte*>(queries[i].q + j);
      const FloatVec q = rest >= kLanes ? load_natural<Dtype::kF32>(at) : load_natural<Dtype::kF32>(at, rest);
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) {
        acc[i * 4 + c] = hn::MulAdd(q, key[c], acc[i * 4 + c]);
      }
    }
  }
  const hn::FixedTag<float, 4> d4;
#pragma GCC unroll 4
  for (int i = 0; i < kQueries; ++i) {
    hn::StoreU(reduce4(acc[i * 4], acc[i * 4 + 1], acc[i * 4 + 2], acc[i * 4 + 3]), d4, scores + i * kRun);
  }
}

// values[j] = values[j] * keep + sum_c weights[c] V[c][j] over `count` keys, for kQueries queries.
template <Dtype kDtype, int kQueries>
HWY_INLINE void add_values(const std::byte* v, const float* weights, int32_t count, const float* keep, int32_t head_dim,
                           const Query* queries) {
  const FloatTag d;
  constexpr int kWide = kQueries == 1 ? 8 : 4;  // vectors of a row of V that are summed at a time
  constexpr auto kBytes = static_cast<int64_t>(dtype_bytes(kDtype));
  int32_t j = 0;
  for (; j + kWide * kLanes <= head_dim; j += kWide * kLanes) {
    FloatVec acc[kQueries * kWide];
#pragma GCC unroll 16
    for (int i = 0; i < kQueries * kWide; ++i) {
      const float* values = queries[i / kWide].state.values() + j + i % kWide * kLanes;
      acc[i] = hn::Mul(hn::Set(d, keep[i / kWide]), hn::LoadU(d, values));
    }
    for (int32_t c = 0; c < count; ++c) {
      const std::byte* row = v + (static_cast<int64_t>(c) * head_dim + j) * kBytes;
      FloatVec value[kWide];
#pragma GCC unroll 8
      for (int n = 0; n < kWide; ++n) {
        value[n] = load_natural<kDtype>(row + n * kLanes * kBytes);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kQueries; ++i) {
        const FloatVec weight = hn::Set(d, weights[i * kRun + c]);
#pragma GCC unroll 8
        for (int n = 0; n < kWide; ++n) {
          acc[i * kWide + n] = hn::MulAdd(weight, value[n], acc[i * kWide + n]);
        }
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kQueries * kWide; ++i) {
      hn::StoreU(acc[i], d, queries[i / kWide].state.values() + j + i % kWide * kLanes);
    }
  }
  for (; j < head_dim; j += kLanes) {
    const int32_t width = std::min(kLanes, head_dim - j);
    for (int i = 0; i < kQueries; ++i) {
      float* values = queries[i].state.values() + j;
      FloatVec acc = hn::Mul(hn::Set(d, keep[i]), hn::LoadU(d, values));
      for (int32_t c = 0; c < count; ++c) {
        const std::byte* row = v + (static_cast<int64_t>(c) * head_dim + j) * kBytes;
        const FloatVec value = width == kLanes ? load_natural<kDtype>(row) : load_natural<kDtype>(row, width);
        acc = hn::MulAdd(hn::Set(d, weights[i * kRun + c]), value, acc);
      }
      hn::StoreU(acc, d, values);
    }
  }
}

// Turns the scores of `count` keys into weights relative to the new maximum; returns the factor for what the
// state holds already.
HWY_INLINE float update_softmax(float* scores, int32_t count, float scale, const State& state) {
  const FloatTag d;
  for (int32_t i = count; i < kRun; ++i) {
    scores[i] = kAbsent;
  }
  FloatVec top = hn::Set(d, state.max());
  for (int32_t i = 0; i < kRun; i += kLanes) {
    const FloatVec scaled = hn::Mul(hn::Set(d, scale), hn::Load(d, scores + i));
    hn::Store(scaled, d, scores + i);
    top = hn::Max(top, scaled);
  }
  for (int32_t i = count; i < kRun; ++i) {
    scores[i] = kAbsent;
  }
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
  return keep;
}

// Takes keys [low, high) of a run into the states of `count` <= kWaiting queries that see exactly these, first
// all scores, then all weights, then all values: each phase hides the latency of the one before. A query's bits
// do not depend on the others.
template <Dtype kDtype>
HWY_INLINE void visit_run(const KeyRun& run, int32_t low, int32_t high, const Query* queries, int32_t count,
                          float scale, int32_t head_dim) {
  const int64_t row_bytes = head_dim * static_cast<int64_t>(dtype_bytes(kDtype));
  alignas(64) float scores[kWaiting * kRun];
  float keep[kWaiting];
  const int32_t keys = high - low;
  for (int32_t c = 0; c < keys; c += 4) {
    const std::byte* key[4];
    for (int32_t n = 0; n < 4; ++n) {
      key[n] = run.k + (low + std::min(c + n, keys - 1)) * row_bytes;
    }
    int32_t i = 0;
    for (; i + 4 <= count; i += 4) {
      score4<kDtype, 4>(queries + i, key, head_dim, scores + i * kRun + c);
    }
    for (; i < count; ++i) {
      score4<kDtype, 1>(queries + i, key, head_dim, scores + i * kRun + c);
    }
  }
  for (int32_t i = 0; i < count; ++i) {
    keep[i] = update_softmax(scores + i * kRun, keys, scale, queries[i].state);
  }
  const std::byte* v = run.v + low * row_bytes;
  int32_t i = 0;
  for (; i + 4 <= count; i += 4) {
    add_values<kDtype, 4>(v, scores + i * kRun, keys, keep + i, head_dim, queries + i);
  }
  for (; i < count; ++i) {
    add_values<kDtype, 1>(v, scores + i * kRun, keys, keep + i, head_dim, queries + i);
  }
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
  for (; j < head_dim; ++j) {
    out[j] = factor * state.values()[j];
  }
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
    const std::byte* k =
        args.kv.block(item.sequence, key, args.layer) +
        (static_cast<int64_t>(item.kv_head) * layout.block_tokens + run_begin - block_begin) * head_dim * kv_bytes;
    const KeyRun run{k, k + args.kv.elements() * kv_bytes};
    Query waiting[kWaiting];  // neighbours that see the same keys of this run
    int32_t count = 0;
    int32_t low = 0;
    int32_t high = 0;
    const auto visit_waiting = [&]() HWY_ATTR {
      if (count > 0) {
        visit_run<kDtype>(run, low, high, waiting, count, args.scale, head_dim);
      }
      count = 0;
    };
    for (int32_t row = item.begin; row < item.end; ++row) {
      const int32_t row_low = std::max(first_position(args, row), run_begin) - run_begin;
      const int32_t row_high = std::min(args.positions[row] + 1, run_end) - run_begin;
      if (row_low >= row_high) {
        continue;
      }
      if (row_low != low || row_high != high) {
        visit_waiting();
      }
      low = row_low;
      high = row_high;
      for (int32_t h = 0; h < heads; ++h) {
        const float* q = args.q.row(row) + static_cast<int64_t>(item.kv_head * heads + h) * head_dim;
        waiting[count++] = {q, state_of(row, h)};
        if (count == kWaiting) {
          visit_waiting();
        }
      }
    }
    visit_waiting();
    key = run_end;
  }
  for (int32_t row = item.begin; row < item.end; ++row) {
    for (int32_t h = 0; h < heads; ++h) {
      finish(args, row, item.kv_head * heads + h, state_of(row, h));
    }
  }
}

// Rows of an item: as many as keep the states within the worker's scratch.
int32_t item_rows(const PagedAttentionArgs& args, const Stream& stream) {
  const int64_t heads = args.num_heads / args.kv.layout.num_kv_heads;
  const int64_t bytes = heads * state_floats(args.kv.layout.head_dim) * static_cast<int64_t>(sizeof(float));
  return static_cast<int32_t>(std::min<int64_t>(kMaxRows, static_cast<int64_t>(stream.scratch_bytes()) / bytes));
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
      if (tile < here) {
        break;
      }
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
void attention_dispatch(const PagedAttentionArgs& args, Stream& stream) {
  paged_attention_cpu(args, stream);
}
}  // namespace moelora::HWY_NAMESPACE
#endif

#if HWY_ONCE
namespace moelora {

HWY_EXPORT(attention_dispatch);

void paged_attention_simd(const PagedAttentionArgs& args, Stream& stream) {
  if (args.rope != nullptr) {
    rope_kv_write_cpu(*args.rope, stream);
  }
  HWY_DYNAMIC_DISPATCH(attention_dispatch)(args, stream);
}

}  // namespace moelora
#endif  // HWY_ONCE
