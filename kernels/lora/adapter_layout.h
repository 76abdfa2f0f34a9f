// SPDX-License-Identifier: Apache-2.0
// The byte stream of an adapter and how kernels find their way in it. One layout serves host memory,
// pool pages, CPU and GPU.
//
// A stream is a sequence of granules of 1 KiB, cut into pool pages; no granule crosses a page. In order:
//   directory   int32 [num_layers][2]: granule of the layer's dense records, granule of its expert
//               records; -1 = the adapter has none there. Whole granules, zero-filled tail.
//   per layer   dense records: kNumDenseModules x LoraRecord, one granule (if any module is adapted);
//               expert records: [E][3] LoraRecord in order gate, up, down (if any expert is adapted);
//               then the matrices.
// Matrices are cut into tiles of 8 ranks x 64 columns (A: k; B: outputs); a tile is 1 granule in bf16,
// 2 granules in fp32 (then the stream keeps such tiles at even granules, so that none crosses a page).
//   A [r, K]: tile (rank panel p, k block c) is tile p * ceil(K/64) + c. In the tile, core matrices of
//             8 x 8: core j holds k = 64c + 8j .. +7; within it element (rank i, k j') at i * 8 + j'.
//   B [N, r]: tile (output block c, rank panel p) is tile c * ceil(r/8) + p. Core j holds outputs
//             n = 64c + 8j .. +7; within it element (output i, rank j') at i * 8 + j'.
// Both are therefore arrays of 64 runs of 8 elements: 16-byte lane loads, and the K-major no-swizzle
// core matrices of wgmma. Ranks and widths that do not fill a tile are zero-filled (never skipped, so
// kernels may read whole tiles, but must not trust activations beyond the real width).
// All values are finite: what fills a pool refuses others, so that kernels may multiply an adapter's B with the zeros
// that stand for rows without it.
// gate and up of one expert may share A (3-D adapters): their records then name the same granule.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/host_device.h"

namespace moelora {

constexpr size_t kGranuleBytes = 1024;
constexpr int kTileRanks = 8;
constexpr int kTileColumns = 64;

// Adapted 2-D linears of a layer. The order is that of the stream; append only.
enum class LoraModule : int32_t {
  kQ = 0,
  kK = 1,
  kV = 2,
  kO = 3,
  kRouter = 4,
  kGate = 5,
  kUp = 6,
  kDown = 7,
  kSharedGate = 8,
  kSharedUp = 9,
  kSharedDown = 10,
  kSharedExpertGate = 11,
  kNone = -1,
};
constexpr int kNumDenseModules = 12;
enum class ExpertModule : int32_t { kGate = 0, kUp = 1, kDown = 2 };
constexpr int kNumExpertModules = 3;
constexpr int kExpertModuleBit = 16;  // of sets of modules, the first of the experts'

// One adapted linear. 32 bytes; granule numbers count from the start of the stream, -1 = absent.
struct LoraRecord {
  int32_t a = -1;          // A [rank, K]
  int32_t b = -1;          // B [N, rank]
  int32_t bias = -1;       // fp32 [N]: lora_B.bias, also times scale
  int32_t magnitude = -1;  // fp32 [N]: DoRA's column factor; reserved, always -1
  int32_t rank = 0;        // 0 = this linear is not adapted (and, without bias, gives no work)
  float scale = 0.0f;      // alpha / r or alpha / sqrt(r)
  int32_t dtype = static_cast<int32_t>(Dtype::kBf16);  // of A and B: kBf16 or kF32
  int32_t reserved = 0;
};
static_assert(sizeof(LoraRecord) == 32);
static_assert(kNumDenseModules * sizeof(LoraRecord) <= kGranuleBytes);

constexpr int32_t tile_granules(Dtype dtype) {
  return dtype == Dtype::kF32 ? 2 : 1;
}
constexpr int32_t ceil_div(int32_t a, int32_t b) {
  return (a + b - 1) / b;
}
// Granules of a matrix of `ranks` x `columns`.
constexpr int32_t matrix_granules(int32_t ranks, int32_t columns, Dtype dtype) {
  return ceil_div(ranks, kTileRanks) * ceil_div(columns, kTileColumns) * tile_granules(dtype);
}
// Index inside a tile (in elements): column 0..63 (k of A, output of B), rank 0..7.
constexpr int32_t tile_index_a(int32_t rank, int32_t column) {
  return (column / 8) * 64 + rank * 8 + column % 8;
}
constexpr int32_t tile_index_b(int32_t rank, int32_t column) {
  return (column / 8) * 64 + (column % 8) * 8 + rank;
}

// A record with the pool pages of its matrices: GPUs keep one for every linear of every resident adapter, so that a
// kernel reads directory, record and page table in one access (each is a round trip to memory in a step that streams
// gigabytes through the cache). Page i of A holds its granules from (a / page_granules + i) * page_granules on.
struct alignas(64) ResolvedLora {
  static constexpr int32_t kPages = 4;
  int32_t rank = 0;  // 0 = not adapted
  float scale = 0.0f;
  int32_t a = -1;
  int32_t b = -1;
  int32_t bias = -1;
  int32_t reserved[3] = {0, 0, 0};
  int32_t a_pages[kPages] = {};  // further pages of a large matrix: AdapterTable::page_table
  int32_t b_pages[kPages] = {};
};
static_assert(sizeof(ResolvedLora) == 64);

// The adapters that the rows of a step can use. Slot 0 is "no adapter". Device memory, read-only in a step.
struct AdapterTable {
  const std::byte* pool = nullptr;      // base of the page pool
  const int32_t* page_table = nullptr;  // [num_slots, pages_per_slot] page ids
  int32_t pages_per_slot = 0;
  int32_t page_granules = 0;  // granules a page
  int32_t num_experts = 0;
  // GPUs: [num_slots, num_layers, kNumDenseModules + 3 * num_experts]; slots in use are resolved.
  const ResolvedLora* resolved = nullptr;
  int32_t num_layers = 0;

  [[nodiscard]] MOELORA_HD int32_t modules_per_layer() const {
    return kNumDenseModules + kNumExpertModules * num_experts;
  }
  // slot > 0.
  [[nodiscard]] MOELORA_HD const ResolvedLora* resolved_dense(int32_t slot, int32_t layer, LoraModule module) const {
    return resolved + (static_cast<int64_t>(slot) * num_layers + layer) * modules_per_layer() +
           static_cast<int32_t>(module);
  }
  [[nodiscard]] MOELORA_HD const ResolvedLora* resolved_expert(int32_t slot, int32_t layer, int32_t expert_index,
                                                               ExpertModule module) const {
    return resolved + (static_cast<int64_t>(slot) * num_layers + layer) * modules_per_layer() + kNumDenseModules +
           expert_index * kNumExpertModules + static_cast<int32_t>(module);
  }
  // Granule first + index of a matrix whose first granule is `first` and whose pages are `pages` (a_pages, b_pages).
  [[nodiscard]] MOELORA_HD const std::byte* resolved_granule(int32_t slot, int32_t first, const int32_t* pages,
                                                             int32_t index) const {
    const int32_t granule_index = first + index;
    const int32_t nth = granule_index / page_granules - first / page_granules;
    const int32_t page = nth < ResolvedLora::kPages
                             ? pages[nth]
                             : page_table[static_cast<int64_t>(slot) * pages_per_slot + granule_index / page_granules];
    return pool + (static_cast<int64_t>(page) * page_granules + granule_index % page_granules) *
                      static_cast<int64_t>(kGranuleBytes);
  }

  [[nodiscard]] MOELORA_HD const std::byte* granule(int32_t slot, int32_t index) const {
    const int32_t page = page_table[static_cast<int64_t>(slot) * pages_per_slot + index / page_granules];
    return pool +
           (static_cast<int64_t>(page) * page_granules + index % page_granules) * static_cast<int64_t>(kGranuleBytes);
  }
  // Granules that lie contiguously in memory from `index` on (to the end of its page).
  [[nodiscard]] MOELORA_HD int32_t run(int32_t index) const { return page_granules - index % page_granules; }

  [[nodiscard]] MOELORA_HD int32_t directory(int32_t slot, int32_t layer, int32_t which) const {
    const int32_t byte = (layer * 2 + which) * 4;
    const std::byte* base = granule(slot, byte / static_cast<int32_t>(kGranuleBytes));
    return reinterpret_cast<const int32_t*>(base)[byte % static_cast<int32_t>(kGranuleBytes) / 4];
  }
  // Null if the layer's module is not adapted in this slot, or slot is 0.
  [[nodiscard]] MOELORA_HD const LoraRecord* dense(int32_t slot, int32_t layer, LoraModule module) const {
    if (slot == 0) {
      return nullptr;
    }
    const int32_t at = directory(slot, layer, 0);
    if (at < 0) {
      return nullptr;
    }
    const auto* record = reinterpret_cast<const LoraRecord*>(granule(slot, at)) + static_cast<int32_t>(module);
    return record->rank == 0 ? nullptr : record;
  }
  [[nodiscard]] MOELORA_HD const LoraRecord* expert(int32_t slot, int32_t layer, int32_t expert_index,
                                                    ExpertModule module) const {
    if (slot == 0) {
      return nullptr;
    }
    const int32_t at = directory(slot, layer, 1);
    if (at < 0) {
      return nullptr;
    }
    const int32_t index = expert_index * kNumExpertModules + static_cast<int32_t>(module);
    constexpr int32_t kPerGranule = kGranuleBytes / sizeof(LoraRecord);
    const auto* record =
        reinterpret_cast<const LoraRecord*>(granule(slot, at + index / kPerGranule)) + index % kPerGranule;
    return record->rank == 0 ? nullptr : record;
  }
};

// The adapters of the rows of one batch. Null in an op's args, or num_rows == 0: no LoRA work at all.
// rows sorted by slot: segment s is sorted_rows[segment_begin[s] .. segment_begin[s+1]), all in
// segment_slot[s] (> 0).
// Kernels read entries of segments side by side with their number: there is room for num_rows of the batch (and one
// more of segment_begin), whatever stands there.
struct LoraBatch {
  AdapterTable table;
  const int32_t* row_slot = nullptr;       // [T] 0 = base
  const float* row_scale = nullptr;        // [T] adapter's default x request's; multiplies record.scale
  const int32_t* sorted_rows = nullptr;    // [num_rows]
  const int32_t* segment_begin = nullptr;  // [num_segments + 1]
  const int32_t* segment_slot = nullptr;   // [num_segments]
  int32_t num_rows = 0;
  int32_t num_segments = 0;
  int32_t max_rank = 0;     // of any adapter in the batch, multiple of 8
  int32_t rank_stride = 0;  // CUDA: floats between shrunk rows in scratch; the same in every batch
  // num_rows, num_segments and max_rank again, in device memory: a captured graph reads them there, so that it stays
  // valid when the adapters of a batch change.
  const int32_t* counts = nullptr;  // [3]
  // What any adapter of the batch may adapt: bit i: LoraModule i; bit 16 + i: ExpertModule i. The same in every batch
  // of a captured graph. An op is not told of adapters that do nothing for it.
  uint32_t modules = ~0u;

  [[nodiscard]] bool adapts(LoraModule module) const { return (modules >> static_cast<int>(module) & 1u) != 0; }
  [[nodiscard]] bool adapts(ExpertModule module) const {
    return (modules >> (kExpertModuleBit + static_cast<int>(module)) & 1u) != 0;
  }
};

// What the next op with adapters will shrink with: an op of the CPU may bring those matrices nearer while it
// multiplies. It changes no result.
struct LoraAhead {
  const LoraBatch* lora = nullptr;  // null: nothing
  int32_t layer = 0;
  LoraModule modules[3] = {LoraModule::kNone, LoraModule::kNone, LoraModule::kNone};
  int32_t k = 0;
};

}  // namespace moelora
