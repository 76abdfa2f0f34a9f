// SPDX-License-Identifier: Apache-2.0
// How the streaming kernel (kernels/moe/expert_decode.cuh) reads weights: a stream is a lane's view of kRowTiles
// neighbouring row tiles of one expert, moving along k. Asynchronous copies take blocks of 64 inputs into a ring of
// kStages stages of kGroup blocks each, in shared memory of the warp. A lane finds its share of a block where it copied
// it itself, so that no barrier is needed; what lanes share comes with a stage's first block.
// A stream also says in which shape its kernel runs, and warps of an item: into how many parts k is cut.
#pragma once

#include "kernels/cuda/shared_tile.cuh"
#include "kernels/moe/expert_gemm.cuh"

namespace moelora {

// For each 128-byte line of a table of `entries`: prefetch(its address), by the threads of the block.
template <class T, class Prefetch>
__device__ __forceinline__ void for_lines(const T* table, int entries, const Prefetch& prefetch) {
  constexpr int kEntries = 128 / static_cast<int>(sizeof(T));
  for (int first = static_cast<int>(threadIdx.x) * kEntries; first < entries;
       first += static_cast<int>(blockDim.x) * kEntries) {
    prefetch(table + first);
  }
}

template <bool GATE_UP>
struct RowsStream {
  using Source = RowsSource<GATE_UP>;
  static constexpr int kWarps = 8;
  static constexpr int kBlocksPerSm = 2;
  static constexpr int kItemWarps = 8;
  static constexpr int kRowTiles = 1;
  static constexpr int kStages = 4;
  static constexpr int kGroup = 1;
  static constexpr int kChunksAhead = 2;  // of tokens
  static constexpr int kBlockBytes = Source::kStageBytes;
  static constexpr int kStageBytes = kGroup * kBlockBytes;
  using Place = std::byte*;  // of a stage
  struct Shared {};
  using Block = typename Source::Block;

  static __device__ __forceinline__ void prefetch_pointers(const ExpertGemm& p) {
    for_lines(p.low, p.num_experts, prefetch_l2);
    for_lines(p.high, p.num_experts, prefetch_l2);
  }
  __device__ __forceinline__ void locate(const ExpertGemm& p, int expert, int tile, int group) {
    source_.locate(p, expert, tile);
    b_ = group;
  }
  __device__ __forceinline__ void advance() { ++b_; }
  __device__ __forceinline__ void rewind(int groups) { b_ -= groups; }
  static __device__ __forceinline__ Place place(std::byte* ring) { return ring; }
  __device__ __forceinline__ void copy(Place stage, int) const { source_.copy(stage, b_); }

  static __device__ __forceinline__ void open(Shared&, Place) {}
  static __device__ __forceinline__ void fetch(Block& block, Place stage, int) { Source::fetch(block, stage); }
  static __device__ __forceinline__ void chunk(const Block& block, const Shared&, int, int c, uint4& low, uint4& high) {
    Source::chunk(block, c, low, high);
  }
  static __device__ __forceinline__ void next_block(Shared&) {}

 private:
  Source source_;
  int b_;
};

// Groups are those of the scales: a lane's scales of four blocks are 16 bytes, fetched at once.
template <bool GATE_UP, int RT>
struct TilesStream {
  using Source = TilesSource<GATE_UP>;
  static constexpr int kWarps = RT == 1 ? 24 : 16;
  static constexpr int kBlocksPerSm = 1;  // so that the tokens of an SM's items, of one expert as a rule, share its L1
  static constexpr int kItemWarps = 4;
  static constexpr int kRowTiles = RT;
  static constexpr int kStages = 2 / RT;
  static constexpr int kGroup = 4;
  static constexpr int kChunksAhead = 1;
  static constexpr int kBlockBytes = RT * kMxfp4TileBytes;
  static constexpr int kStageBytes = kGroup * kBlockBytes + RT * kMxfp4ScaleGroupBytes;
  using Place = uint32_t;  // of this lane's first 16 bytes in a stage, in shared memory
  struct Shared {
    uint4 scales[RT];  // of this block and the following ones of the group
  };
  struct Block {
    uint4 data[RT];
  };

  static __device__ __forceinline__ void prefetch_pointers(const ExpertGemm& p) {
    for_lines(p.low, p.num_experts, prefetch_l2);
    for_lines(p.scales, p.num_experts, prefetch_l2);
  }
  __device__ __forceinline__ void locate(const ExpertGemm& p, int expert, int tile, int group) {
    const Mxfp4TileShape shape{p.row_tiles, p.k_blocks};
    const auto* data = static_cast<const std::byte*>(p.low[expert]) + 16 * lane_index();
#pragma unroll
    for (int i = 0; i < RT; ++i) {
      const int64_t block = int64_t{(min(tile + i + 1, p.row_tiles) - 1)} * shape.k_blocks + group * kGroup;
      data_[i] = data + block * kMxfp4TileBytes;
    }
    // Lane 8i + j copies piece j of the scales of row tile i.
    const int64_t scales = int64_t{(min(tile + lane_index() / 8 + 1, p.row_tiles) - 1)} * shape.scale_groups() + group;
    scales_ =
        reinterpret_cast<const std::byte*>(p.scales[expert]) + scales * kMxfp4ScaleGroupBytes + 16 * (lane_index() % 8);
  }
  __device__ __forceinline__ void advance() {
#pragma unroll
    for (int i = 0; i < RT; ++i) {
      data_[i] += kGroup * kMxfp4TileBytes;
    }
    scales_ += kMxfp4ScaleGroupBytes;
  }
  __device__ __forceinline__ void rewind(int groups) {
#pragma unroll
    for (int i = 0; i < RT; ++i) {
      data_[i] -= int64_t{groups} * kGroup * kMxfp4TileBytes;
    }
    scales_ -= int64_t{groups} * kMxfp4ScaleGroupBytes;
  }
  static __device__ __forceinline__ Place place(std::byte* ring) { return shared_address(ring) + 16 * lane_index(); }
  // Block q of the group; the scales of all of it with the first one.
  __device__ __forceinline__ void copy(Place place, int q) const {
#pragma unroll
    for (int i = 0; i < RT; ++i) {
      async_copy16(place + q * kBlockBytes + i * kMxfp4TileBytes, data_[i] + q * kMxfp4TileBytes);
    }
    if (q == 0 && lane_index() < 8 * RT) {
      async_copy16(place + kGroup * kBlockBytes, scales_);
    }
  }

  static __device__ __forceinline__ void open(Shared& shared, Place place) {
    const uint32_t scales = place + kGroup * kBlockBytes + 16 * (lane_index() / 4) - 16 * lane_index();
    __syncwarp();  // the scales, which other lanes copied, are there
#pragma unroll
    for (int i = 0; i < RT; ++i) {
      shared.scales[i] = load_shared16(scales + i * kMxfp4ScaleGroupBytes);
    }
    __syncwarp();  // and may be replaced
  }
  static __device__ __forceinline__ void fetch(Block& block, Place place, int q) {
#pragma unroll
    for (int i = 0; i < RT; ++i) {
      block.data[i] = load_shared16(place + q * kBlockBytes + i * kMxfp4TileBytes);
    }
  }
  static __device__ __forceinline__ void chunk(const Block& block, const Shared& shared, int i, int c, uint4& low,
                                               uint4& high) {
    Source::chunk({block.data[i], shared.scales[i].x}, c, low, high);
  }
  static __device__ __forceinline__ void next_block(Shared& shared) {
#pragma unroll
    for (int i = 0; i < RT; ++i) {
      shared.scales[i] = make_uint4(shared.scales[i].y, shared.scales[i].z, shared.scales[i].w, 0);
    }
  }

 private:
  const std::byte* data_[RT];
  const std::byte* scales_;
};

}  // namespace moelora
