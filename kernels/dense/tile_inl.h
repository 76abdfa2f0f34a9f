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

template <Dtype kDtype>
HWY_INLINE void dot_direct_panel(int rows, const uint8_t* const* w, const float* const* x, int32_t k,
                                 const uint8_t* ahead, float* sums, int64_t stride) {
  switch (rows) {
    case 1: return dot_direct<kDtype, 1>(w, x, k, ahead, sums, stride);
    case 2: return dot_direct<kDtype, 2>(w, x, k, ahead, sums, stride);
    case 3: return dot_direct<kDtype, 3>(w, x, k, ahead, sums, stride);
    default: break;
  }
  if constexpr (kPanel == 6) {
    switch (rows) {
      case 4: return dot_direct<kDtype, 4>(w, x, k, ahead, sums, stride);
      case 5: return dot_direct<kDtype, 5>(w, x, k, ahead, sums, stride);
      default: return dot_direct<kDtype, 6>(w, x, k, ahead, sums, stride);
    }
  }
}

HWY_INLINE void dot_widened_panel(int rows, const float* group, const float* const* x, int64_t vectors, bool first,
                                  bool last, float* partial, float* sums, int64_t stride) {
  switch (rows) {
    case 1: return dot_widened<1>(group, x, vectors, first, last, partial, sums, stride);
    case 2: return dot_widened<2>(group, x, vectors, first, last, partial, sums, stride);
    case 3: return dot_widened<3>(group, x, vectors, first, last, partial, sums, stride);
    default: break;
  }
  if constexpr (kPanel == 6) {
    switch (rows) {
      case 4: return dot_widened<4>(group, x, vectors, first, last, partial, sums, stride);
      case 5: return dot_widened<5>(group, x, vectors, first, last, partial, sums, stride);
      default: return dot_widened<6>(group, x, vectors, first, last, partial, sums, stride);
    }
  }
}

// Sums of a block of at most kRowBlock rows with weights read in place. `ahead`: the tile that comes next.
template <Dtype kDtype>
HWY_INLINE void sum_direct(const TileWeights& w, const float* const* x, int32_t rows, int32_t k,
                           const uint8_t* ahead, float* const* sums) {
  const int64_t row_bytes = static_cast<int64_t>(k) * static_cast<int64_t>(dtype_bytes(kDtype));
  const int32_t panels = (rows + kPanel - 1) / kPanel;
  for (int32_t m = 0; m < w.matrices; ++m) {
    for (int32_t n = 0; n < w.count; n += kGroup) {
      const uint8_t* group[kGroup];
      for (int o = 0; o < kGroup; ++o) group[o] = w.data[m] + std::min(n + o, w.count - 1) * row_bytes;
      const bool more = n + kGroup < w.count;
      const uint8_t* next = more ? group[0] + kGroup * row_bytes : m + 1 < w.matrices ? w.data[m + 1] : ahead;
      for (int32_t p = 0; p < panels; ++p) {
        const int32_t begin = p * rows / panels;
        dot_direct_panel<kDtype>((p + 1) * rows / panels - begin, group, x + begin, k, p == 0 ? next : nullptr,
                                 sums[m] + begin * kMaxTileOutputs + n, kMaxTileOutputs);
      }
    }
  }
}

// Brings memory that this worker reads later into L2, a few lines at a time between microkernels.
struct Prefetcher {
  const uint8_t* at = nullptr;
  const uint8_t* end = nullptr;
  HWY_INLINE void lines(int64_t count) {
    for (; count > 0 && at < end; --count, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// The same from a tile made fp32 by widen_tile. `next_tile` is drained evenly over the calls of a tile.
HWY_INLINE void sum_widened(const float* widened, int32_t outputs, const float* const* x, int32_t rows, int32_t k,
                            float* partial, float* sums, Prefetcher& next_tile, int64_t lines_a_call) {
  const int64_t vectors = (k + kBlock - 1) / kBlock * 2;
  const int32_t panels = (rows + kPanel - 1) / kPanel;
  const int32_t groups = (outputs + kGroup - 1) / kGroup;
  for (int32_t p = 0; p < panels; ++p) {
    const int32_t begin = p * rows / panels;
    const int32_t count = (p + 1) * rows / panels - begin;
    for (int64_t v = 0; v < vectors; v += kDepth / kLanes) {
      const int64_t slice = std::min<int64_t>(vectors - v, kDepth / kLanes);
      const bool last = v + slice == vectors;
      const float* slice_x[kPanel];
      for (int32_t r = 0; r < count; ++r) slice_x[r] = x[begin + r] + v * kLanes;
      // The rows of the next slice, or of the next panel's first, in as many pieces as there are groups.
      const int32_t next = last ? begin + count : begin;
      const int32_t next_rows = std::min(count, rows - next);
      const int64_t next_at = last ? 0 : v + slice;
      const int64_t piece = (std::min<int64_t>(vectors - next_at, kDepth / kLanes) + groups - 1) / groups;
      for (int32_t g = 0; g < groups; ++g) {
        for (int32_t r = 0; r < next_rows; ++r) {
          const float* from = x[next + r] + (next_at + g * piece) * kLanes;
          for (int64_t i = 0; i < piece; ++i) __builtin_prefetch(from + i * kLanes, 0, 2);
        }
        next_tile.lines(lines_a_call);
        const int64_t n = g * kGroup;
        dot_widened_panel(count, widened + (n * vectors + v * kGroup) * kLanes, slice_x, slice, v == 0, last,
                          partial + n * kPanel * kLanes, sums + begin * kMaxTileOutputs + n, kMaxTileOutputs);
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
  float* const partial = first_sums + kSumsFloats;
  float* const widened = partial + kPartialFloats;
  const int64_t matrix_floats = static_cast<int64_t>((w.count + 3) / 4 * 4) * padded_k(k);
  const bool direct = rows.count <= kDirectRows ||
                      matrix_floats * w.matrices * static_cast<int64_t>(sizeof(float)) >
                          static_cast<int64_t>(kWidenedBytes);
  Prefetcher next;
  int64_t lines_a_call = 0;
  if (!direct) {
    for (int32_t m = 0; m < w.matrices; ++m) {
      widen_tile<kDtype>(w.data[m], w.count, k, widened + m * matrix_floats);
    }
    if (ahead != nullptr) {
      const int64_t bytes = w.count * static_cast<int64_t>(k) * static_cast<int64_t>(dtype_bytes(kDtype));
      const int64_t calls = (rows.count + kPanel - 1) / kPanel * ((k + kDepth - 1) / kDepth) * ((w.count + 3) / 4);
      next = {ahead, ahead + bytes};
      lines_a_call = bytes / 64 / calls + 1;
    }
  }
  for (int32_t begin = 0; begin < rows.count; begin += kRowBlock) {
    const int32_t count = std::min(rows.count - begin, kRowBlock);
    const float* x[kRowBlock];
    for (int32_t r = 0; r < count; ++r) x[r] = rows.row(begin + r);
    if (direct) {
      sum_direct<kDtype>(w, x, count, k, ahead, sums);
    } else {
      for (int32_t m = 0; m < w.matrices; ++m) {
        sum_widened(widened + m * matrix_floats, w.count, x, count, k, partial, sums[m], next, lines_a_call);
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
