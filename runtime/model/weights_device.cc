// SPDX-License-Identifier: Apache-2.0
// Weights in the memory of a device that cannot read the checkpoint: matrices as bf16, vectors as fp32, a router in
// fp32 unless it is stored as bf16, MXFP4 experts as tiles. One allocation holds all; tensors come through the device's
// staging memory, so the host never holds more than the mapped file and a few megabytes.
#include <algorithm>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include "kernels/base/error.h"
#include "kernels/moe/mxfp4_tiles.h"
#include "runtime/model/tensor_plan.h"
#include "runtime/model/weights_storage.h"

namespace moelora {
namespace {

constexpr size_t kAlignment = 256;
constexpr int64_t kConvertElements = int64_t{4} << 20;

size_t aligned(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Lays tensors out one after the other; with memory it fills them too.
class Builder {
 public:
  Builder(const ModelConfig& config, Device& device, Stream& stream, const Kernels& kernels, bool random, uint64_t seed)
      : config_(config), device_(device), stream_(stream), kernels_(kernels), random_(random), seed_(seed) {}

  // Null: only counts bytes.
  void begin(std::byte* memory) {
    memory_ = memory;
    used_ = 0;
    tensor_ = 0;
  }
  [[nodiscard]] size_t used() const { return used_; }

  [[nodiscard]] bool fills() const { return memory_ != nullptr; }

  void tensor(const PlannedTensor& planned) {
    Weight& weight = *planned.weight;
    const bool is_matrix = !is_vector(planned.kind);
    const bool keeps_f32 = planned.kind == TensorKind::kRouter && weight.dtype != Dtype::kBf16;
    const Dtype dtype = is_matrix && !keeps_f32 ? Dtype::kBf16 : Dtype::kF32;
    if (is_matrix && planned.cols % 8 != 0) {
      throw Error(Status::kUnsupported, fmt::format("tensor '{}' has {} columns: a GPU needs a multiple of 8",
                                                    planned.names.front(), planned.cols));
    }
    const void* to = matrix(weight.data, weight.dtype, planned.rows, planned.cols, dtype, planned.kind);
    if (memory_ != nullptr) {
      weight = {to, dtype, planned.rows, planned.cols};
    }
  }

  // Rows of every expert of a projection; pointers to them on the device.
  void expert_rows(const PlannedExperts& planned) {
    ExpertWeights& weights = *planned.weights;
    const auto count = static_cast<size_t>(config_.num_experts);
    std::vector<const void*> pointers(count);
    for (size_t e = 0; e < count; ++e) {
      const void* from = random_ ? nullptr : (*planned.data)[e];
      pointers[e] =
          matrix(from, weights.dtype, planned.rows, planned.cols, Dtype::kBf16, TensorKind::kMatrix, weights.row_step);
    }
    const void* table = bytes(pointers.data(), count * sizeof(void*));
    const float* bias = vector(weights.bias, count * static_cast<size_t>(planned.rows), has_vectors());
    if (memory_ != nullptr) {
      weights = {};
      weights.data = static_cast<const void* const*>(table);
      weights.rows = planned.rows;
      weights.cols = planned.cols;
      weights.bias = bias;
    }
  }

  // Sinks and expert biases, which only gpt-oss has.
  [[nodiscard]] bool has_vectors() const { return config_.family == Family::kGptOss; }

  // fp32 values of ours, copied; small random ones for a random model.
  const float* vector(const float* from, size_t count, bool present) {
    if (!present) {
      return nullptr;
    }
    std::vector<float> drawn;
    if (random_ && from == nullptr && memory_ != nullptr) {
      for (size_t i = 0; i < count; ++i) {
        drawn.push_back(kRandomBias * (static_cast<float>((i * 2654435761u + ++tensor_) % 1000) / 500.0f - 1.0f));
      }
      from = drawn.data();
    }
    return static_cast<const float*>(bytes(from, count * sizeof(float)));
  }

  // MXFP4: `gate_up` packs gate and up into one set of tiles. Scales of a random model stay in a narrow range.
  void expert_tiles(ExpertWeights& weights, ExpertWeights* up, const Mxfp4TileShape& shape) {
    const auto count = static_cast<size_t>(config_.num_experts);
    std::vector<const void*> data(count);
    std::vector<const void*> scales(count);
    for (size_t e = 0; e < count; ++e) {
      std::byte* tiles = take(static_cast<size_t>(shape.data_bytes()));
      std::byte* tile_scales = take(static_cast<size_t>(shape.scale_bytes()));
      data[e] = tiles;
      scales[e] = tile_scales;
      if (memory_ == nullptr) {
        continue;
      }
      if (random_) {
        fill_bits(tiles, shape.data_bytes());
        fill_scales(tile_scales, shape.scale_bytes(), up == nullptr ? kRandomDownShift : 0);
        continue;
      }
      pack(weights, up, e, tiles, tile_scales);
    }
    const void* table = bytes(data.data(), count * sizeof(void*));
    const void* scale_table = bytes(scales.data(), count * sizeof(void*));
    const float* bias = vector(weights.bias, count * static_cast<size_t>(weights.rows), has_vectors());
    const float* up_bias =
        up != nullptr ? vector(up->bias, count * static_cast<size_t>(up->rows), has_vectors()) : nullptr;
    if (memory_ == nullptr) {
      return;
    }
    for (ExpertWeights* projection : {&weights, up}) {
      if (projection == nullptr) {
        continue;
      }
      projection->data = static_cast<const void* const*>(table);
      projection->scales = static_cast<const uint8_t* const*>(scale_table);
      projection->format = ExpertFormat::kMxfp4Tiles;
      projection->row_step = 1;
      projection->bias = projection == up ? up_bias : bias;
    }
  }

  void finish() { device_.synchronize(stream_); }

 private:
  std::byte* take(size_t count) {
    std::byte* at = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += aligned(count);
    return at;
  }

  const void* bytes(const void* from, size_t count) {
    std::byte* to = take(count);
    if (memory_ != nullptr) {
      device_.copy_to_device(to, from, count, stream_);
    }
    return to;
  }

  void fill(void* to, Dtype dtype, int64_t count, float scale) {
    FillRandomArgs args;
    args.data = to;
    args.dtype = dtype;
    args.count = count;
    args.scale = scale;
    args.seed = seed_ * 1000003u + ++tensor_;
    kernels_.fill_random(args, stream_);
  }
  void fill_bits(std::byte* to, int64_t count) { fill(to, Dtype::kBf16, count / 2, 1.0f); }
  // Bytes 0x76 to 0x79, less `shift`: what makes 2880 random nibbles a row of norm near 1. Rows of 64 KiB that repeat.
  void fill_scales(std::byte* to, int64_t count, int shift) {
    std::vector<uint8_t> pattern(65536);
    for (uint32_t i = 0; i < pattern.size(); ++i) {
      pattern[i] = static_cast<uint8_t>(0x76 - shift + static_cast<int>(i * 2654435761u >> 30));
    }
    for (int64_t at = 0; at < count; at += 65536) {
      device_.copy_to_device(to + at, pattern.data(), static_cast<size_t>(std::min<int64_t>(65536, count - at)),
                             stream_);
    }
  }

  const void* matrix(const void* from, Dtype from_dtype, int32_t rows, int32_t cols, Dtype dtype, TensorKind kind,
                     int32_t row_step = 1) {
    const int64_t count = int64_t{rows} * cols;
    std::byte* to = take(static_cast<size_t>(count) * dtype_bytes(dtype));
    if (memory_ == nullptr) {
      return to;
    }
    if (random_ && kind != TensorKind::kNorm) {
      fill(to, dtype, count, kind == TensorKind::kBias ? kRandomBias : std::sqrt(3.0f / static_cast<float>(cols)));
      return to;
    }
    if (from_dtype == dtype && row_step == 1 && !random_) {
      device_.copy_to_device(to, from, static_cast<size_t>(count) * dtype_bytes(dtype), stream_);
      return to;
    }
    convert(from, from_dtype, rows, cols, row_step, dtype, to);
    return to;
  }

  void convert(const void* from, Dtype from_dtype, int32_t rows, int32_t cols, int32_t row_step, Dtype dtype,
               std::byte* to) {
    const int32_t rows_at_once = static_cast<int32_t>(std::clamp<int64_t>(kConvertElements / cols, 1, rows));
    converted_.resize(static_cast<size_t>(rows_at_once) * static_cast<size_t>(cols) * dtype_bytes(dtype));
    for (int32_t first = 0; first < rows; first += rows_at_once) {
      const int32_t count = std::min(rows_at_once, rows - first);
      for (int32_t r = 0; r < count; ++r) {
        const int64_t source = (int64_t{first} + r) * row_step * cols;
        for (int32_t c = 0; c < cols; ++c) {
          const float value = random_ ? 1.0f : load_element(from, from_dtype, static_cast<size_t>(source + c));
          const size_t at = static_cast<size_t>(r) * static_cast<size_t>(cols) + static_cast<size_t>(c);
          if (dtype == Dtype::kF32) {
            std::memcpy(converted_.data() + at * 4, &value, 4);
          } else {
            const uint16_t half = f32_to_bf16(value);
            std::memcpy(converted_.data() + at * 2, &half, 2);
          }
        }
      }
      const size_t row_bytes = static_cast<size_t>(cols) * dtype_bytes(dtype);
      device_.copy_to_device(to + static_cast<size_t>(first) * row_bytes, converted_.data(),
                             static_cast<size_t>(count) * row_bytes, stream_);
    }
  }

  // One expert from the file into its tiles, through device memory of its stored size.
  void pack(const ExpertWeights& weights, const ExpertWeights* up, size_t e, std::byte* tiles, std::byte* tile_scales) {
    const size_t stored_rows = static_cast<size_t>(weights.rows) * (up != nullptr ? 2 : 1);
    const size_t block_bytes = stored_rows * static_cast<size_t>(weights.cols) / 2;
    const size_t scale_bytes = stored_rows * static_cast<size_t>(weights.cols) / 32;
    if (raw_.bytes() < aligned(block_bytes) + scale_bytes) {
      device_.synchronize(stream_);
      raw_ = DeviceMemory(device_, aligned(block_bytes) + scale_bytes, "an expert as it is stored");
    }
    const auto* scales = weights.scales[e];
    if (std::any_of(scales, scales + scale_bytes, [](uint8_t scale) { return scale > kMxfp4ScaleMax; })) {
      throw Error(Status::kUnsupported,
                  fmt::format("MXFP4 scales above 2^{} are not supported on a GPU", kMxfp4ScaleMax - 127));
    }
    device_.copy_to_device(raw_.data(), weights.data[e], block_bytes, stream_);
    device_.copy_to_device(raw_.data() + aligned(block_bytes), scales, scale_bytes, stream_);
    PackMxfp4Args args;
    args.blocks = reinterpret_cast<const uint8_t*>(raw_.data());
    args.scales = reinterpret_cast<const uint8_t*>(raw_.data() + aligned(block_bytes));
    args.rows = weights.rows;
    args.cols = weights.cols;
    args.gate_up = up != nullptr;
    args.tiles = tiles;
    args.tile_scales = tile_scales;
    kernels_.pack_mxfp4(args, stream_);
  }

  const ModelConfig& config_;
  Device& device_;
  Stream& stream_;
  const Kernels& kernels_;
  bool random_;
  uint64_t seed_;
  std::byte* memory_ = nullptr;
  size_t used_ = 0;
  uint64_t tensor_ = 0;
  std::vector<std::byte> converted_;
  DeviceMemory raw_;
};

void lay_out(const ModelConfig& config, Weights& weights, Builder& builder) {
  for (const PlannedTensor& planned : plan_tensors(config, weights)) {
    if (planned.kind == TensorKind::kSinks || planned.kind == TensorKind::kExpertBias) {
      continue;  // their fp32 copies go along below
    }
    builder.tensor(planned);
  }
  for (size_t i = 0; i < weights.layers.size(); ++i) {
    LayerWeights& layer = weights.layers[i];
    const float* sinks = builder.vector(layer.sinks, static_cast<size_t>(config.num_heads), builder.has_vectors());
    if (builder.fills()) {
      layer.sinks = sinks;
    }
    if (config.layer_is_moe[i] == 0) {
      continue;
    }
    if (!layer.router_offsets.empty()) {
      const float* offsets = builder.vector(layer.router_offsets.data(), layer.router_offsets.size(), true);
      if (builder.fills()) {
        layer.router_bias = {offsets, Dtype::kF32, 1, config.num_experts};
      }
    }
    if (layer.expert_gate.format == ExpertFormat::kMxfp4Rows) {
      builder.expert_tiles(layer.expert_gate, &layer.expert_up,
                           mxfp4_gate_up_shape(layer.expert_gate.rows, layer.expert_gate.cols));
      builder.expert_tiles(layer.expert_down, nullptr,
                           mxfp4_down_shape(layer.expert_down.rows, layer.expert_down.cols));
      continue;
    }
    for (const PlannedExperts& planned : plan_experts(config, layer)) {
      builder.expert_rows(planned);
    }
  }
}

}  // namespace

void Weights::move_to(Device& device, Stream& stream, const Kernels& kernels, const ModelConfig& config, bool random,
                      uint64_t seed) {
  Builder builder(config, device, stream, kernels, random, seed);
  builder.begin(nullptr);
  lay_out(config, *this, builder);
  builder.vector(nullptr, config.inv_freq.size(), true);
  storage_->device = DeviceMemory(device, builder.used(), "weights");
  builder.begin(storage_->device.data());
  lay_out(config, *this, builder);
  inv_freq = builder.vector(config.inv_freq.data(), config.inv_freq.size(), true);
  builder.finish();
  if (config.tie_embeddings) {
    lm_head = embedding;
  }
  storage_->checkpoint.reset();
  storage_->memory.clear();
  for (LayerWeights& layer : layers) {
    layer.stored_sinks = layer.stored_gate_up_bias = layer.stored_down_bias = {};
  }
}

}  // namespace moelora
