// SPDX-License-Identifier: Apache-2.0
// From microkernels to a tile: the products of a set of rows with some consecutive rows of one or two weight
// matrices, by dots (dot_inl.h) or by classes (outer_inl.h), and the loop that hands tiles to workers. linear,
// moe_gate_up and moe_down differ only in where the rows come from and in what `finish` does with a block of
// sums (LoRA, bias, silu, store).
#if defined(MOELORA_KERNELS_DENSE_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOELORA_KERNELS_DENSE_TILE_INL_H_
#undef MOELORA_KERNELS_DENSE_TILE_INL_H_
#else
#define MOELORA_KERNELS_DENSE_TILE_INL_H_
#endif

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "kernels/base/read_spans.h"
#include "kernels/base/stream.h"
#include "kernels/dense/outer_inl.h"

HWY_BEFORE_NAMESPACE();
namespace moelora {
namespace HWY_NAMESPACE {

constexpr int kTileOutputs = 64;   // of all matrices of a tile; also the stride of its sums
constexpr int kTileRows = 512;     // rows of a tile by classes whose sums wait for `finish` together
constexpr int kDotRows = 96;       // the same of other tiles; a multiple of kPanel
constexpr int kInPlaceRows = 36;   // up to here a tile is read in place (measured)
constexpr int kInPlaceMxfp4 = 18;  // the same for MXFP4 (measured)
constexpr int kClassesRows = 192;  // from here on tiles go by classes (measured)
constexpr size_t kWidenedBytes = 1u << 20;
constexpr size_t kTileScratchBytes =
    size_t{kTileRows} * kTileOutputs * sizeof(float) + std::max(kWidenedBytes, size_t{kOuterFloats} * sizeof(float));

// Rows of activations as pack_rows made them: row i is packed + stride * (index ? index[begin + i] : begin + i).
struct TileRows {
  const float* packed;
  int64_t stride;
  bool by_classes;  // packed for outer_inl.h
  const int32_t* index;
  int32_t begin;
  int32_t count;
  [[nodiscard]] const float* row(int32_t i) const {
    return packed + stride * (index == nullptr ? begin + i : index[begin + i]);
  }
};

// `count` weight rows of each of `matrices` matrices; none: no tile.
struct TileWeights {
  StoredRows rows[2];
  int32_t matrices = 0;
  int32_t count = 0;
  const ReadSpans* beside = nullptr;  // may be null
};

// Outputs of a tile, of each matrix: a multiple of 8, so that tiles meet the cores of LoRA's B. By classes as many as
// registers are made for; else few enough that a widened tile stays in L2 beside its rows and that `total` outputs
// make `each` tiles for every worker, if there is more than one. A power of two then: no tile reads parts of two
// granules of B.
inline int32_t tile_outputs(int32_t k, int32_t matrices, bool by_classes, int64_t total, int threads, int each = 32) {
  if (by_classes) {
    return kTileOutputs / matrices;
  }
  const int64_t fit = static_cast<int64_t>(kWidenedBytes / 2) / (padded_k(k) * 4 * matrices);
  int64_t share = kTileOutputs;
  while (threads > 1 && share > 8 && share * each * threads > total) {
    share /= 2;
  }
  return static_cast<int32_t>(std::clamp<int64_t>(std::min(fit, share) / 8 * 8, 8, kTileOutputs));
}

// A row of k elements in the order that the tiles of this op read.
inline void pack_tile_row(const float* x, int32_t k, PackOrder order, Compute compute, bool by_classes, float* packed,
                          std::byte* scratch) {
  if (!by_classes) {
    return pack_row(x, k, order, compute, packed);
  }
  float* const slice = reinterpret_cast<float*>(scratch);
  for (int32_t at = 0; at < k; at += kSlice) {
    const int32_t count = std::min<int32_t>(k - at, kSlice);
    pack_row(x + at, count, order, compute, slice);
    order_by_classes(slice, count, packed + at);
  }
}

// Calls run(std::integral_constant<int, rows>) for rows in [1, kMost], kMost 3 or 6.
template <int kMost, class Run>
HWY_INLINE void with_rows(int32_t rows, const Run& run) {
  switch (rows) {
    case 1:
      return run(std::integral_constant<int, 1>());
    case 2:
      return run(std::integral_constant<int, 2>());
    case 3:
      return run(std::integral_constant<int, 3>());
    case 4:
      return run(std::integral_constant<int, std::min(4, kMost)>());
    case 5:
      return run(std::integral_constant<int, std::min(5, kMost)>());
    default:
      return run(std::integral_constant<int, kMost>());
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

// Brings the next tile, and what it has beside, into L2, a few lines at a time in about `calls` steps.
class Prefetcher {
 public:
  // Where rows of a matrix have gaps, the other matrix lies in them. row_bytes == 0: the weights come another way.
  Prefetcher(const TileWeights& tile, int64_t row_bytes, int64_t calls)
      : tile_(tile),
        matrices_(row_bytes == 0                       ? 0
                  : tile.rows[0].stride > row_bytes ? std::min(tile.matrices, 1)
                                                    : tile.matrices),
        bytes_(tile.count * tile.rows[0].stride),
        lines_(matrices_ * bytes_ / 64 / calls + 1),
        spans_(tile.beside != nullptr ? tile.beside->spans : nullptr),
        spans_end_(tile.beside != nullptr ? spans_ + tile.beside->count : nullptr),
        span_chunks_(tile.beside != nullptr ? tile.beside->num_bytes / kChunkBytes / calls + 1 : 0) {}
  HWY_INLINE void step() {
    for (int64_t chunk = 0; chunk < span_chunks_ && spans_ != spans_end_; ++chunk) {
#pragma GCC unroll 4
      for (int32_t line = 0; line < kChunkBytes; line += 64) __builtin_prefetch(spans_->first + span_at_ + line, 0, 2);
      span_at_ += kChunkBytes;
      if (span_at_ >= spans_->bytes) {
        span_at_ = 0;
        ++spans_;
      }
    }
    for (int64_t line = 0; line < lines_ && matrix_ < matrices_; ++line) {
      __builtin_prefetch(tile_.rows[matrix_].first + at_, 0, 2);
      at_ += 64;
      if (at_ < bytes_) {
        continue;
      }
      at_ = 0;
      ++matrix_;
    }
  }

 private:
  static constexpr int32_t kChunkBytes = 256;  // of a span; a span may end within one

  const TileWeights& tile_;
  int32_t matrices_;
  int64_t bytes_;
  int64_t lines_;
  const ReadSpans::Span* spans_;
  const ReadSpans::Span* spans_end_;
  int64_t span_chunks_;
  int32_t span_at_ = 0;
  int64_t at_ = 0;
  int32_t matrix_ = 0;
};

// The outputs of a tile in groups of four. The last group of a count that four does not divide overlaps the one
// before it (the same products twice); fewer than four outputs are taken one by one. Group g leaves its sums
// at 4 g; `compact` moves them to where their outputs belong.
struct Groups {
  explicit Groups(int32_t outputs)
      : count(outputs < kGroup ? outputs : (outputs + kGroup - 1) / kGroup), outputs_(outputs) {}
  [[nodiscard]] int32_t row(int32_t g) const { return single() ? g : std::min(g * kGroup, outputs_ - kGroup); }
  [[nodiscard]] bool single() const { return outputs_ < kGroup; }
  void compact(float* sums, int32_t rows) const {
    if (outputs_ % kGroup == 0) {
      return;
    }
    for (int32_t r = 0; r < rows; ++r, sums += kTileOutputs) {
      for (int32_t g = single() ? 1 : count - 1; g < count; ++g) {
        std::copy_n(sums + g * kGroup, single() ? 1 : kGroup, sums + row(g));
      }
    }
  }
  int32_t count;

 private:
  int32_t outputs_;
};

// kInPlace reads stored weights, kWiden also leaves them in fp32, kWidened reads what kWiden left.
enum class Source : uint8_t { kInPlace, kWiden, kWidened };

struct DotTile {
  StoredRows weights;
  int32_t outputs;
  int32_t k;
  float* widened;  // [group][vector of k][4][L]
  float* sums;     // [rows, kTileOutputs]
};

// Sums of some rows in the way of dot_inl.h. kInPlace runs over the whole of k for four weight rows at a time, as they
// lie in memory, and reads ahead (into `ahead`, which may be null, after the last). The other two run slice of k by
// slice, so that the slices of one panel's rows stay in L1 while the tile passes by, and drain `next`.
template <Stored kStored, Source kSource>
HWY_INLINE void sum_rows(const DotTile& tile, const float* const* x, int32_t rows, const StoredRows* ahead,
                         Prefetcher& next) {
  const Groups groups(tile.outputs);
  const int64_t vectors = (tile.k + kBlock - 1) / kBlock * 2;
  const int32_t panels = Panel::ceil_panels(rows);
  const int64_t depth = kSource == Source::kInPlace ? tile.k : kSlice;
  for (int64_t at = 0; at < tile.k; at += depth) {
    const int64_t count = std::min<int64_t>(tile.k - at, depth);
    for (int32_t g = 0; g < groups.count; ++g) {
      StoredRows stored = tile.weights.from<kStored>(groups.row(g), at);
      if (groups.single()) {
        stored.stride = stored.scale_stride = 0;
      }
      const bool more = g + 1 < groups.count || ahead == nullptr;
      const StoredRows following = more ? stored.from<kStored>(kGroup, 0) : *ahead;
      float* const widened = tile.widened + (g * vectors + at / kLanes) * kGroup * kLanes;
      next.step();
      for (int32_t p = 0; p < panels; ++p) {
        const Panel panel(p, rows);
        const float* panel_x[kPanel];
        for (int32_t r = 0; r < panel.count; ++r) {
          panel_x[r] = x[panel.begin + r] + at;
        }
        const Sums to{at == 0, tile.sums + panel.begin * kTileOutputs + g * kGroup, kTileOutputs};
        with_rows<kPanel>(panel.count, [&](auto panel_rows) HWY_ATTR {
          if constexpr (kSource == Source::kWidened) {
            dot_widened<panel_rows>(widened, panel_x, (count + kBlock - 1) / kBlock * 2, to);
          } else if constexpr (kSource == Source::kWiden) {
            dot_stored<kStored, panel_rows, true>(stored, panel_x, count, ReadAhead(), widened, to);
          } else {
            // Two panels share the work of reading ahead, so that memory is busy while each of them computes.
            const ReadAhead read{following.first + p % 2 * 2 * stored.stride, following.scales, p == 0, panels == 1};
            dot_stored<kStored, panel_rows, false>(stored, panel_x, count, read, nullptr, to);
          }
        });
      }
    }
  }
}

// Sums of a block of at most kDotRows rows of a tile; `first`: nothing of the tile is widened yet.
template <Stored kStored>
HWY_INLINE void sum_by_dots(const TileWeights& w, int32_t k, bool in_place, bool first, const float* const* x,
                            int32_t rows, float* widened, float* const* sums, const TileWeights& next_tile,
                            Prefetcher& next) {
  const int64_t matrix_floats = Groups(w.count).count * kGroup * padded_k(k);
  for (int32_t m = 0; m < w.matrices; ++m) {
    DotTile tile{w.rows[m], w.count, k, widened + m * matrix_floats, sums[m]};
    if (in_place) {
      const StoredRows* after = m + 1 < w.matrices ? &w.rows[m + 1] : next_tile.matrices > 0 ? next_tile.rows : nullptr;
      sum_rows<kStored, Source::kInPlace>(tile, x, rows, after, next);
    } else {
      for (int32_t r = 0; r < rows; r += kPanel, tile.sums += kPanel * kTileOutputs) {
        const int32_t panel_rows = std::min(kPanel, rows - r);
        if (first && r == 0) {
          sum_rows<kStored, Source::kWiden>(tile, x + r, panel_rows, nullptr, next);
        } else {
          sum_rows<kStored, Source::kWidened>(tile, x + r, panel_rows, nullptr, next);
        }
      }
    }
    Groups(w.count).compact(sums[m], rows);
  }
}

// Sums of one slice of k of kOuterOutputs weight rows: all classes for kStackRows rows at a time.
template <Stored kStored>
HWY_INLINE void sum_slice(const StoredRow* weights, int64_t at, int64_t count, const float* const* x, int32_t rows,
                          float* scratch, float* sums, Prefetcher& next) {
  float* const stack = scratch;
  float* const transposed = stack + kStackFloats;
  const int64_t blocks = (count + kBlock - 1) / kBlock;
  transpose_slice<kStored>(weights, at, count, transposed);
  for (int32_t begin = 0; begin < rows; begin += kStackRows) {
    const int32_t block_rows = std::min(rows - begin, kStackRows);
    const int32_t panels = (block_rows + kOuterRows - 1) / kOuterRows;
    for (int i = 0; i < kLanes; ++i) {
      const int64_t lane = class_at(i);
      const float* values = transposed + lane * kClassFloats;
      for (int32_t p = 0; p < panels; ++p) {
        next.step();
        const int32_t first = p * block_rows / panels;
        const int32_t panel_rows = (p + 1) * block_rows / panels - first;
        const float* panel_x[kOuterRows];
        for (int32_t r = 0; r < panel_rows; ++r) {
          panel_x[r] = x[begin + first + r] + at + lane * 2 * blocks;
        }
        // The rows that come next, from L2 or beyond: those of the next panel, or of the first in the next class.
        const bool more = p + 1 < panels;
        const int64_t next_at = at + (more || i + 1 == kLanes ? lane : class_at(i + 1)) * 2 * blocks;
        for (int32_t r = 0; r < kOuterRows; ++r) {
          const float* from = x[begin + std::min((more ? first + panel_rows : 0) + r, block_rows - 1)] + next_at;
          for (int64_t step = 0; step < 2 * blocks; step += 16) {
            __builtin_prefetch(from + step, 0, 3);
          }
        }
        const Sums to{at == 0, sums + (begin + first) * kTileOutputs, kTileOutputs};
        with_rows<kOuterRows>(panel_rows, [&](auto row_count) HWY_ATTR {
          run_class<row_count>(values, panel_x, 2 * blocks, __builtin_ctz(~static_cast<unsigned>(i)), i + 1 == kLanes,
                               stack + first * kOuterOutputs, to);
        });
      }
    }
  }
}

// Sums of all outputs of a tile through transposed slices. Outputs that a tile lacks repeat the last one.
template <Stored kStored>
HWY_INLINE void sum_by_classes(const TileWeights& w, int32_t k, const float* const* x, int32_t rows, float* scratch,
                               float* sums, Prefetcher& next) {
  const int32_t each = kTileOutputs / w.matrices;
  for (int32_t n = 0; n < kTileOutputs; n += kOuterOutputs) {
    if (n % each >= w.count) {
      continue;
    }
    StoredRow weights[kOuterOutputs];
    for (int32_t o = 0; o < kOuterOutputs; ++o) {
      const StoredRows row = w.rows[(n + o) / each].from<kStored>(std::min((n + o) % each, w.count - 1), 0);
      weights[o] = {row.first, row.scales};
    }
    for (int64_t at = 0; at < k; at += kSlice) {
      sum_slice<kStored>(weights, at, std::min<int64_t>(k - at, kSlice), x, rows, scratch, sums + n, next);
    }
  }
}

// Computes one tile; finish(first row, rows, sums) sees each block of rows: matrix m's output j of row r is
// sums[m][r * kTileOutputs + j]. `next_tile` is what this worker runs next: prefetched meanwhile.
template <Stored kStored, class Finish>
HWY_INLINE void run_tile(const TileWeights& w, const TileRows& rows, int32_t k, const TileWeights& next_tile,
                         std::byte* scratch, const Finish& finish) {
  float* const base = reinterpret_cast<float*>(scratch);
  float* const work = base + kTileRows * kTileOutputs;
  float* const sums[2] = {base, base + (rows.by_classes ? kTileOutputs / 2 : kDotRows * kTileOutputs)};
  const auto widened_bytes =
      Groups(w.count).count * kGroup * padded_k(k) * w.matrices * static_cast<int64_t>(sizeof(float));
  constexpr int kMost = kStored == Stored::kMxfp4 ? kInPlaceMxfp4 : kInPlaceRows;
  const bool in_place = rows.count <= kMost || widened_bytes > static_cast<int64_t>(kWidenedBytes);
  const int64_t panels = Panel::ceil_panels(rows.count) * ((k + kSlice - 1) / kSlice);
  const int64_t groups = Groups(w.count).count * w.matrices;
  Prefetcher next(next_tile, in_place ? 0 : stored_bytes(kStored, k),
                  in_place ? groups : panels * (rows.by_classes ? kLanes : groups));
  const int32_t most = rows.by_classes ? kTileRows : kDotRows;
  const int32_t blocks = (rows.count + most - 1) / most;
  for (int32_t b = 0; b < blocks; ++b) {
    const int32_t begin = static_cast<int32_t>(static_cast<int64_t>(b) * rows.count / blocks);
    const int32_t count = static_cast<int32_t>(static_cast<int64_t>(b + 1) * rows.count / blocks) - begin;
    const float* x[kTileRows];
    for (int32_t r = 0; r < count; ++r) {
      x[r] = rows.row(begin + r);
    }
    if (rows.by_classes) {
      sum_by_classes<kStored>(w, k, x, count, work, base, next);
    } else {
      sum_by_dots<kStored>(w, k, in_place, b == 0, x, count, work, sums, next_tile, next);
    }
    finish(begin, count, sums);
  }
}

template <class Finish>
HWY_INLINE void run_tile(Dtype dtype, const TileWeights& w, const TileRows& rows, int32_t k, const TileWeights& next,
                         std::byte* scratch, const Finish& finish) {
  switch (dtype) {
    case Dtype::kF32:
      return run_tile<Stored::kF32>(w, rows, k, next, scratch, finish);
    case Dtype::kF16:
      return run_tile<Stored::kF16>(w, rows, k, next, scratch, finish);
    case Dtype::kBf16:
      return run_tile<Stored::kBf16>(w, rows, k, next, scratch, finish);
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
