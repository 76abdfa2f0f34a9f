// SPDX-License-Identifier: Apache-2.0
// From microkernels to a tile: the products of a set of rows with some consecutive rows of one or two weight
// matrices, and the loop that hands tiles to workers. linear, moe_gate_up and moe_down differ only in where
// the rows come from and in what `finish` does with a block of sums (LoRA, bias, silu, store).
#if defined(MOELORA_KERNELS_DENSE_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOELORA_KERNELS_DENSE_TILE_INL_H_
#undef MOELORA_KERNELS_DENSE_TILE_INL_H_
#else
#define MOELORA_KERNELS_DENSE_TILE_INL_H_
#endif

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "kernels/base/stream.h"
#include "kernels/dense/dot_inl.h"

HWY_BEFORE_NAMESPACE();
namespace moelora {
namespace HWY_NAMESPACE {

constexpr int kMaxTileOutputs = 64;   // of one matrix
constexpr int kRowBlock = 96;         // rows whose sums wait for `finish` together; a multiple of kPanel
constexpr int kDirectRows = 12;       // up to here a tile is read in place
constexpr size_t kSumsFloats = size_t{2} * kRowBlock * kMaxTileOutputs;
constexpr size_t kWidenedBytes = 1u << 20;
constexpr size_t kTileScratchBytes = kSumsFloats * sizeof(float) + kWidenedBytes;

// Rows of activations in pack order: row i is packed + stride * (index ? index[begin + i] : begin + i).
struct TileRows {
  const float* packed;
  int64_t stride;
  const int32_t* index;
  int32_t begin;
  int32_t count;
  [[nodiscard]] const float* row(int32_t i) const {
    return packed + stride * (index == nullptr ? begin + i : index[begin + i]);
  }
};

// `count` consecutive weight rows starting at `data`, of each of `matrices` matrices.
struct TileWeights {
  const uint8_t* data[2];
  int32_t matrices;
  int32_t count;
};

// Outputs of a tile (of each matrix): a multiple of 8, so that tiles meet the cores of LoRA's B; few enough that a
// widened tile fits and that `total` outputs make several tiles for every worker.
inline int32_t tile_outputs(int32_t k, int32_t matrices, int32_t rows, int64_t total, int threads) {
  const int64_t fit = static_cast<int64_t>(kWidenedBytes / 2) / (padded_k(k) * 4 * matrices);
  const int64_t share = total / (4 * threads);
  const int64_t most = rows > kDirectRows ? kMaxTileOutputs : 32;
  return static_cast<int32_t>(std::clamp<int64_t>(std::min(fit, share) / 8 * 8, 8, most));
}

// Calls run(std::integral_constant<int, rows>) for rows in [1, kPanel].
template <class Run>
HWY_INLINE void with_rows(int32_t rows, const Run& run) {
  switch (rows) {
    case 1: return run(std::integral_constant<int, 1>());
    case 2: return run(std::integral_constant<int, 2>());
    case 3: return run(std::integral_constant<int, 3>());
    case 4: return run(std::integral_constant<int, std::min(4, kPanel)>());
    case 5: return run(std::integral_constant<int, std::min(5, kPanel)>());
    default: return run(std::integral_constant<int, kPanel>());
  }
}

// Panel p of `rows` rows cut as evenly as panels of at most kPanel rows allow.
struct Panel {
  Panel(int32_t p, int32_t rows) {
    const int32_t panels = ceil_panels(rows);
    begin = p * rows / panels;
    count = (p + 1) * rows / panels - begin;
  }
  static int32_t ceil_panels(int32_t rows) { return (rows + kPanel - 1) / kPanel; }
  int32_t begin;
  int32_t count;
};

// Brings memory that this worker reads later into L2, a few lines at a time between microkernels.
struct Prefetcher {
  const uint8_t* at = nullptr;
  const uint8_t* end = nullptr;
  int64_t lines_a_call = 0;
  HWY_INLINE void step() {
    for (int64_t line = 0; line < lines_a_call && at < end; ++line, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// One tile of one matrix and where its microkernels work.
struct TileMatrix {
  const uint8_t* data;
  int32_t count;
  int32_t k;
  float* widened;  // [group][vector of k][4][L]
  float* sums;     // [rows, kMaxTileOutputs]
};

// kInPlace reads stored weights, kWiden also leaves them in fp32, kWidened reads what kWiden left.
enum class Source : uint8_t { kInPlace, kWiden, kWidened };

// The outputs of a tile in groups of four. The last group of a count that four does not divide overlaps the one
// before it (the same products twice); fewer than four outputs are taken one by one. Group g leaves its sums
// at 4 g; `compact` moves them to where their outputs belong.
struct Groups {
  explicit Groups(int32_t outputs)
      : count(outputs < kGroup ? outputs : (outputs + kGroup - 1) / kGroup), outputs_(outputs) {}
  [[nodiscard]] int32_t row(int32_t g) const { return single() ? g : std::min(g * kGroup, outputs_ - kGroup); }
  [[nodiscard]] bool single() const { return outputs_ < kGroup; }
  void compact(float* sums, int32_t rows) const {
    if (outputs_ % kGroup == 0) return;
    for (int32_t r = 0; r < rows; ++r, sums += kMaxTileOutputs) {
      for (int32_t g = single() ? 1 : count - 1; g < count; ++g) {
        std::copy_n(sums + g * kGroup, single() ? 1 : kGroup, sums + row(g));
      }
    }
  }
  int32_t count;

 private:
  int32_t outputs_;
};

// Sums of at most kDirectRows rows. kInPlace runs over the whole of k for four weight rows at a time, as they lie
// in memory, and reads ahead (into `ahead`, which may be null, after the last). The other two run slice of k by
// slice, so that the slices of a panel's rows stay in L1 while the tile passes by, and drain `next`.
template <Dtype kDtype, Source kSource>
HWY_INLINE void sum_rows(const TileMatrix& w, const float* const* x, int32_t rows, const uint8_t* ahead,
                         Prefetcher& next) {
  constexpr auto kBytes = static_cast<int64_t>(dtype_bytes(kDtype));
  const Groups groups(w.count);
  const int64_t vectors = (w.k + kBlock - 1) / kBlock * 2;
  const int32_t panels = Panel::ceil_panels(rows);
  const int64_t depth = kSource == Source::kInPlace ? w.k : kSlice;
  for (int64_t at = 0; at < w.k; at += depth) {
    const int64_t count = std::min<int64_t>(w.k - at, depth);
    for (int32_t g = 0; g < groups.count; ++g) {
      const int64_t stride = groups.single() ? 0 : w.k * kBytes;
      const StoredRows stored{w.data + groups.row(g) * w.k * kBytes + at * kBytes, stride};
      const bool more = g + 1 < groups.count;
      const uint8_t* following = more || ahead == nullptr ? stored.first + kGroup * stride : ahead;
      float* const widened = w.widened + (g * vectors + at / kLanes) * kGroup * kLanes;
      if constexpr (kSource != Source::kInPlace) next.step();
      for (int32_t p = 0; p < panels; ++p) {
        const Panel panel(p, rows);
        const float* panel_x[kPanel];
        for (int32_t r = 0; r < panel.count; ++r) panel_x[r] = x[panel.begin + r] + at;
        const Sums to{at == 0, w.sums + panel.begin * kMaxTileOutputs + g * kGroup, kMaxTileOutputs};
        with_rows(panel.count, [&](auto panel_rows) HWY_ATTR {
          if constexpr (kSource == Source::kWidened) {
            dot_widened<panel_rows>(widened, panel_x, (count + kBlock - 1) / kBlock * 2, to);
          } else if constexpr (kSource == Source::kWiden) {
            dot_stored<kDtype, panel_rows, true>(stored, panel_x, count, ReadAhead(), widened, to);
          } else {
            const ReadAhead read{following + p % 2 * 2 * stride, p == 0, panels == 1};
            dot_stored<kDtype, panel_rows, false>(stored, panel_x, count, read, nullptr, to);
          }
        });
      }
    }
  }
}

// Computes one tile; finish(first row, rows, sums) sees each block of rows, sums[m][r * kMaxTileOutputs + j].
// `ahead` (may be null): the weights of the tile that this worker runs next.
template <Dtype kDtype, class Finish>
HWY_INLINE void run_tile(const TileWeights& w, const TileRows& rows, int32_t k, const uint8_t* ahead,
                         std::byte* scratch, const Finish& finish) {
  float* const first_sums = reinterpret_cast<float*>(scratch);
  float* const sums[2] = {first_sums, first_sums + kSumsFloats / 2};
  float* const widened = first_sums + kSumsFloats;
  const int64_t matrix_floats = Groups(w.count).count * kGroup * padded_k(k);
  const bool direct = rows.count <= kDirectRows ||
                      matrix_floats * w.matrices * static_cast<int64_t>(sizeof(float)) >
                          static_cast<int64_t>(kWidenedBytes);
  const int32_t blocks = (rows.count + kRowBlock - 1) / kRowBlock;
  Prefetcher next;
  if (!direct && ahead != nullptr) {
    const int64_t bytes = w.count * static_cast<int64_t>(k) * static_cast<int64_t>(dtype_bytes(kDtype));
    next = {ahead, ahead + bytes, 0};
    next.lines_a_call =
        bytes / 64 / (Panel::ceil_panels(rows.count) * ((k + kSlice - 1) / kSlice) * Groups(w.count).count) + 1;
  }
  for (int32_t b = 0; b < blocks; ++b) {
    const int32_t begin = b * rows.count / blocks;
    const int32_t count = (b + 1) * rows.count / blocks - begin;
    const float* x[kRowBlock];
    for (int32_t r = 0; r < count; ++r) x[r] = rows.row(begin + r);
    for (int32_t m = 0; m < w.matrices; ++m) {
      TileMatrix matrix{w.data[m], w.count, k, widened + m * matrix_floats, sums[m]};
      const int32_t step = direct ? kDirectRows : kPanel;
      for (int32_t r = 0; r < count; r += step, matrix.sums += step * kMaxTileOutputs) {
        const int32_t step_rows = std::min(step, count - r);
        if (direct) {
          sum_rows<kDtype, Source::kInPlace>(matrix, x + r, step_rows,
                                             m + 1 < w.matrices ? w.data[m + 1] : ahead, next);
        } else if (b == 0 && r == 0) {
          sum_rows<kDtype, Source::kWiden>(matrix, x + r, step_rows, nullptr, next);
        } else {
          sum_rows<kDtype, Source::kWidened>(matrix, x + r, step_rows, nullptr, next);
        }
      }
    }
    for (int32_t m = 0; m < w.matrices; ++m) Groups(w.count).compact(sums[m], count);
    finish(begin, count, sums);
  }
}

template <class Finish>
HWY_INLINE void run_tile(Dtype dtype, const TileWeights& w, const TileRows& rows, int32_t k, const uint8_t* ahead,
                         std::byte* scratch, const Finish& finish) {
  switch (dtype) {
    case Dtype::kF32: return run_tile<Dtype::kF32>(w, rows, k, ahead, scratch, finish);
    case Dtype::kF16: return run_tile<Dtype::kF16>(w, rows, k, ahead, scratch, finish);
    case Dtype::kBf16: return run_tile<Dtype::kBf16>(w, rows, k, ahead, scratch, finish);
  }
}

// task(ticket, next, worker) for every ticket in [0, count). `next` is the ticket that this worker runs after
// (>= count: none), known in advance so that its weights can be prefetched.
template <class Task>
void for_each_ticket(Stream& stream, int32_t count, const Task& task) {
  std::atomic<int32_t> tickets{0};
  stream.parallel([&](int worker) {
    int32_t ticket = tickets.fetch_add(1, std::memory_order_relaxed);
    while (ticket < count) {
      const int32_t next = tickets.fetch_add(1, std::memory_order_relaxed);
      task(ticket, next, worker);
      ticket = next;
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace moelora
HWY_AFTER_NAMESPACE();

#endif  // MOELORA_KERNELS_DENSE_TILE_INL_H_
