// SPDX-License-Identifier: Apache-2.0
// The experts of a drawn MoE layer in device memory, as the CUDA ops take them: bf16 rows, alternating rows, or MXFP4
// tiles packed on the device; and their exact values for oracles.
#pragma once

#include <cmath>
#include <optional>
#include <vector>

#include "kernels/moe/expert_weights.h"
#include "kernels/moe/mxfp4_tiles.h"
#include "tests/support/device_buffer.cuh"
#include "tests/support/draw.h"

namespace moelora::test {

enum class Store : uint8_t { kRows, kAlternatingRows, kTiles };
constexpr Store kStores[] = {Store::kRows, Store::kAlternatingRows, Store::kTiles};

inline float e2m1(int32_t nibble) {
  constexpr float kValues[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  return (nibble & 8) != 0 ? -kValues[nibble & 7] : kValues[nibble & 7];
}

// A stored matrix of MXFP4 rows, drawn, and its values.
struct Mxfp4Rows {
  Mxfp4Rows(int32_t num_rows, int32_t num_cols, int32_t scale_min, int32_t scale_max, Draw& draw)
      : rows(num_rows), cols(num_cols) {
    const auto count = static_cast<size_t>(rows) * static_cast<size_t>(cols);
    for (size_t i = 0; i < count / 2; ++i) {
      blocks.push_back(static_cast<uint8_t>(draw.below(256)));
    }
    for (size_t i = 0; i < count / 32; ++i) {
      scales.push_back(static_cast<uint8_t>(scale_min + draw.below(scale_max - scale_min + 1)));
    }
    for (size_t i = 0; i < count; ++i) {
      const int32_t nibble = i % 2 == 0 ? blocks[i / 2] & 15 : blocks[i / 2] >> 4;
      values.push_back(std::ldexp(e2m1(nibble), scales[i / 32] - 127));
    }
  }
  int32_t rows, cols;
  std::vector<uint8_t> blocks, scales;
  std::vector<float> values;
};

// Device pointers to `count` pieces of `bytes` each, with a gap of poison after each.
struct DevicePieces {
  DevicePieces(size_t count, size_t piece_bytes)
      : bytes(piece_bytes), stride((piece_bytes + 511) / 256 * 256), memory(count * stride), pointers([&] {
          std::vector<const void*> at;
          for (size_t i = 0; i < count; ++i) {
            at.push_back(memory.as<char>() + i * stride);
          }
          return at;
        }()) {}
  [[nodiscard]] char* piece(size_t i) const { return memory.as<char>() + i * stride; }
  void write(size_t i, const void* from) const {
    REQUIRE(cudaMemcpy(piece(i), from, bytes, cudaMemcpyHostToDevice) == cudaSuccess);
  }
  size_t bytes, stride;
  DeviceBuffer memory;
  DeviceBuffer pointers;
};

// One or two (gate and up) projections of all experts.
class DeviceExperts {
 public:
  // `pair`: two projections of `rows` outputs each, else one.
  DeviceExperts(int32_t experts, int32_t rows, int32_t cols, bool pair, Store store, int32_t scale_min,
                int32_t scale_max, Draw& draw)
      : rows_(rows), cols_(cols), halves_(pair ? 2 : 1), store_(store) {
    const auto count = static_cast<size_t>(rows) * static_cast<size_t>(cols);
    if (store == Store::kTiles) {
      if (cols % 32 == 0) {  // else there are no such tiles: the test is of the layer's other half
        make_tiles(experts, scale_min, scale_max, draw);
      }
      return;
    }
    const bool joined = store == Store::kAlternatingRows;
    for (int32_t h = 0; h < (joined ? 1 : halves_); ++h) {
      data_.emplace_back(static_cast<size_t>(experts), count * 2 * static_cast<size_t>(joined ? halves_ : 1));
    }
    for (int32_t e = 0; e < experts; ++e) {
      values_.push_back(rounded_to_bf16(draw.floats(count * static_cast<size_t>(halves_))));
      for (size_t piece = 0; piece < data_.size(); ++piece) {
        std::vector<uint16_t> halves;
        for (size_t i = 0; i < data_[piece].bytes / 2; ++i) {
          const size_t row = i / static_cast<size_t>(cols);
          const size_t half = joined ? row % static_cast<size_t>(halves_) : piece;
          const size_t n = joined ? row / static_cast<size_t>(halves_) : row;
          halves.push_back(f32_to_bf16(values_.back()[index(half, n, i % static_cast<size_t>(cols))]));
        }
        data_[piece].write(static_cast<size_t>(e), halves.data());
      }
    }
    if (joined) {  // up begins one row later
      std::vector<const char*> shifted;
      for (int32_t e = 0; e < experts; ++e) {
        shifted.push_back(data_[0].piece(static_cast<size_t>(e)) + (halves_ - 1) * cols * 2);
      }
      second_.emplace(shifted);
    }
  }
  // Projection `half`; bias may be null.
  [[nodiscard]] ExpertWeights view(int32_t half, const float* bias) const {
    ExpertWeights weights;
    weights.dtype = Dtype::kBf16;
    weights.rows = rows_;
    weights.cols = cols_;
    weights.bias = bias;
    if (store_ == Store::kTiles) {
      weights.format = ExpertFormat::kMxfp4Tiles;
      if (half == 0) {
        weights.data = data_[0].pointers.as<const void*>();
        weights.scales = scales_[0].pointers.as<const uint8_t*>();
      }
      return weights;
    }
    weights.row_step = store_ == Store::kAlternatingRows ? halves_ : 1;
    const bool second = store_ == Store::kAlternatingRows && half == 1;
    const size_t piece = store_ == Store::kRows ? static_cast<size_t>(half) : 0;
    weights.data = second ? second_->as<const void*>() : data_[piece].pointers.as<const void*>();
    return weights;
  }
  [[nodiscard]] double dot(int32_t expert, int32_t half, int32_t n, const float* x) const {
    const float* row = values_[static_cast<size_t>(expert)].data() + index(half, n, 0);
    double sum = 0.0;
    for (int32_t k = 0; k < cols_; ++k) {
      sum += static_cast<double>(row[k]) * static_cast<double>(x[k]);
    }
    return sum;
  }

 private:
  template <class A, class B, class C>
  [[nodiscard]] size_t index(A half, B n, C k) const {
    return (static_cast<size_t>(half) * static_cast<size_t>(rows_) + static_cast<size_t>(n)) *
               static_cast<size_t>(cols_) +
           static_cast<size_t>(k);
  }
  void make_tiles(int32_t experts, int32_t scale_min, int32_t scale_max, Draw& draw) {
    const Mxfp4TileShape shape = halves_ == 2 ? mxfp4_gate_up_shape(rows_, cols_) : mxfp4_down_shape(rows_, cols_);
    data_.emplace_back(static_cast<size_t>(experts), static_cast<size_t>(shape.data_bytes()));
    scales_.emplace_back(static_cast<size_t>(experts), static_cast<size_t>(shape.scale_bytes()));
    for (int32_t e = 0; e < experts; ++e) {
      const Mxfp4Rows stored(rows_ * halves_, cols_, scale_min, scale_max, draw);
      std::vector<float> values(stored.values.size());
      for (int32_t row = 0; row < stored.rows; ++row) {
        std::copy_n(stored.values.begin() + int64_t{row} * cols_, cols_,
                    values.begin() + static_cast<int64_t>(index(row % halves_, row / halves_, 0)));
      }
      values_.push_back(values);
      const DeviceBuffer blocks(stored.blocks);
      const DeviceBuffer scales(stored.scales);
      REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
      pack_mxfp4_cuda({blocks.as<uint8_t>(), scales.as<uint8_t>(), rows_, cols_, halves_ == 2,
                       data_[0].piece(static_cast<size_t>(e)), scales_[0].piece(static_cast<size_t>(e))},
                      *gpu()->stream);
      REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    }
  }

  int32_t rows_, cols_, halves_;
  Store store_;
  std::vector<std::vector<float>> values_;  // [E] of [half][n][k]
  std::vector<DevicePieces> data_;
  std::vector<DevicePieces> scales_;
  std::optional<DeviceBuffer> second_;
};

}  // namespace moelora::test
