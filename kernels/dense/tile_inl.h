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
constexpr int kRowBlock = 48;         // rows whose sums wait for `finish` together; a multiple of kPanel
constexpr int kDirectRows = 12;       // up to here a tile is read in place
constexpr size_t kSumsFloats = size_t{2} * kRowBlock * kMaxTileOutputs;
constexpr size_t kPartialFloats = size_t{kMaxTileOutputs / kGroup} * kPanel * kGroup * kLanes;
constexpr size_t kWidenedBytes = 1u << 20;
constexpr size_t kTileScratchBytes = (kSumsFloats + kPartialFloats) * sizeof(float) + kWidenedBytes;

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

// Outputs of a tile (of each matrix): a multiple of 8, so that tiles meet the cores of LoRA's B.
inline int32_t tile_outputs(int32_t k, int32_t matrices, int32_t rows) {
  const int64_t fit = static_cast<int64_t>(kWidenedBytes / 2) / (padded_k(k) * 4 * matrices);
  const int64_t most = rows > kDirectRows ? kMaxTileOutputs : 32;
  return static_cast<int32_t>(std::clamp<int64_t>(fit / 8 * 8, 8, most));
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
  float* partial;
  float* sums;     // [rows, kMaxTileOutputs]
};

// Sums of a block of rows with weights read in place. `ahead`: the tile that comes next.
template <Dtype kDtype>
HWY_INLINE void sum_direct(const TileMatrix& w, const float* const* x, int32_t rows, const uint8_t* ahead) {
  const int64_t row_bytes = w.k * static_cast<int64_t>(dtype_bytes(kDtype));
  for (int32_t n = 0; n < w.count; n += kGroup) {
    const uint8_t* group[kGroup];
    for (int o = 0; o < kGroup; ++o) group[o] = w.data + std::min(n + o, w.count - 1) * row_bytes;
    const uint8_t* next = n + kGroup < w.count ? group[0] + kGroup * row_bytes : ahead;
    for (int32_t p = 0; p < Panel::ceil_panels(rows); ++p) {
      const Panel panel(p, rows);
      const Slice slice{true, true, nullptr, w.sums + panel.begin * kMaxTileOutputs + n, kMaxTileOutputs};
      with_rows(panel.count, [&](auto count) HWY_ATTR {
        dot_stored<kDtype, count, false>(group, x + panel.begin, w.k, p == 0 ? next : nullptr, row_bytes, nullptr,
                                         slice);
      });
    }
  }
}

// Sums of one panel, slice of k by slice so that its rows stay in L1. kWiden: from stored weights, which it
// leaves in w.widened; else from there.
template <Dtype kDtype, bool kWiden>
HWY_INLINE void sum_panel(const TileMatrix& w, const float* const* x, const Panel& panel, Prefetcher& next) {
  const int64_t row_bytes = w.k * static_cast<int64_t>(dtype_bytes(kDtype));
  const int64_t vectors = (w.k + kBlock - 1) / kBlock * 2;
  for (int64_t at = 0; at < w.k; at += kDepth) {
    const int64_t depth = std::min<int64_t>(w.k - at, kDepth);
    const float* slice_x[kPanel];
    for (int32_t r = 0; r < panel.count; ++r) slice_x[r] = x[panel.begin + r] + at;
    for (int32_t n = 0; n < w.count; n += kGroup) {
      next.step();
      float* const widened = w.widened + (n * vectors + at / kLanes * kGroup) * kLanes;
      const Slice slice{at == 0, at + depth == w.k, w.partial + static_cast<int64_t>(n) * kPanel * kLanes,
                        w.sums + panel.begin * kMaxTileOutputs + n, kMaxTileOutputs};
      with_rows(panel.count, [&](auto count) HWY_ATTR {
        if constexpr (kWiden) {
          const uint8_t* group[kGroup];
          for (int o = 0; o < kGroup; ++o) {
            group[o] = w.data + std::min(n + o, w.count - 1) * row_bytes + at * static_cast<int64_t>(dtype_bytes(kDtype));
          }
          dot_stored<kDtype, count, true>(group, slice_x, depth, nullptr, 0, widened, slice);
        } else {
          dot_widened<count>(widened, slice_x, (depth + kBlock - 1) / kBlock * 2, slice);
        }
      });
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
  float* const partial = first_sums + kSumsFloats;
  float* const widened = partial + kPartialFloats;
  const int64_t matrix_floats = static_cast<int64_t>((w.count + 3) / 4 * 4) * padded_k(k);
  const bool direct = rows.count <= kDirectRows ||
                      matrix_floats * w.matrices * static_cast<int64_t>(sizeof(float)) >
                          static_cast<int64_t>(kWidenedBytes);
  const int32_t blocks = (rows.count + kRowBlock - 1) / kRowBlock;
  Prefetcher next;
  if (!direct && ahead != nullptr) {
    const int64_t bytes = w.count * static_cast<int64_t>(k) * static_cast<int64_t>(dtype_bytes(kDtype));
    next = {ahead, ahead + bytes, 0};
    next.lines_a_call =
        bytes / 64 / (Panel::ceil_panels(rows.count) * ((k + kDepth - 1) / kDepth) * ((w.count + 3) / 4)) + 1;
  }
  for (int32_t b = 0; b < blocks; ++b) {
    const int32_t begin = b * rows.count / blocks;
    const int32_t count = (b + 1) * rows.count / blocks - begin;
    const float* x[kRowBlock];
    for (int32_t r = 0; r < count; ++r) x[r] = rows.row(begin + r);
    for (int32_t m = 0; m < w.matrices; ++m) {
      const TileMatrix matrix{w.data[m], w.count, k, widened + m * matrix_floats, partial, sums[m]};
      if (direct) {
        sum_direct<kDtype>(matrix, x, count, m + 1 < w.matrices ? w.data[m + 1] : ahead);
        continue;
      }
      for (int32_t p = 0; p < Panel::ceil_panels(count); ++p) {
        if (b == 0 && p == 0) {
          sum_panel<kDtype, true>(matrix, x, Panel(p, count), next);
        } else {
          sum_panel<kDtype, false>(matrix, x, Panel(p, count), next);
        }
      }
    }
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
