// SPDX-License-Identifier: Apache-2.0
// Random weights for benchmarks, in the shapes and the dtype that config.json names. One anonymous mapping holds
// all tensors, so that bandwidth can be measured on the very memory a step reads. Values are a function of
// (seed, tensor, element) alone: two runs agree whatever the number of cores.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include "kernels/base/error.h"
#include "kernels/base/stream.h"
#include "kernels/memory/fill_random.h"
#include "runtime/model/tensor_plan.h"
#include "runtime/model/weights_storage.h"

namespace moelora {
namespace {

constexpr size_t kAlignment = 64;

size_t aligned(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

size_t matrix_bytes(Dtype dtype, int32_t rows, int32_t cols) {
  return static_cast<size_t>(expert_bytes(false, dtype, rows, cols));
}

uint64_t mix(uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// 1 + j/128, j in 0..15: such values are exact in all three dtypes, so no rounding is needed.
void fill_norm(std::byte* data, Dtype dtype, int32_t count, uint64_t seed) {
  for (int32_t i = 0; i < count; ++i) {
    const uint32_t j = static_cast<uint32_t>(mix(seed + static_cast<uint64_t>(i)) & 15u);
    std::byte* element = data + static_cast<size_t>(i) * dtype_bytes(dtype);
    if (dtype == Dtype::kF32) {
      const float value = 1.0f + static_cast<float>(j) / 128.0f;
      std::memcpy(element, &value, sizeof value);
    } else {
      const auto bits = static_cast<uint16_t>(dtype == Dtype::kBf16 ? 0x3F80u + j : 0x3C00u + (j << 3));
      std::memcpy(element, &bits, sizeof bits);
    }
  }
}

// Hands out the mapping front to back and fills each piece.
class Filler {
 public:
  Filler(const AnonymousMemory& memory, Dtype dtype, uint64_t seed, Stream& stream)
      : memory_(memory), dtype_(dtype), seed_(seed), stream_(stream) {}

  const void* fill(TensorKind kind, int32_t rows, int32_t cols) {
    std::byte* data = take(matrix_bytes(dtype_, rows, cols));
    const uint64_t seed = mix(seed_ ^ mix(++tensor_));
    if (kind == TensorKind::kNorm) {
      fill_norm(data, dtype_, cols, seed);
      return data;
    }
    FillRandomArgs args;
    args.data = data;
    args.dtype = dtype_;
    args.count = int64_t{rows} * cols;
    // Uniform in [-s, s) has standard deviation s / sqrt(3).
    const bool bias = kind != TensorKind::kMatrix && kind != TensorKind::kRouter;
    args.scale = bias ? kRandomBias : std::sqrt(3.0f / static_cast<float>(cols));
    args.seed = seed;
    fill_random_cpu(args, stream_);
    return data;
  }

  // MXFP4: nibbles of `rows` rows, then their scales. Nibbles are uniform over E2M1, whose root mean square is 2.93; of
  // four scales the second is the power of two below what makes that 1/sqrt(cols), so 118 to 121 for 2880 inputs.
  Mxfp4Rows fill_mxfp4(int32_t rows, int32_t cols, int shift) {
    const size_t nibbles = static_cast<size_t>(rows) * static_cast<size_t>(cols) / 2;
    std::byte* data = take(nibbles + nibbles / 16);
    const uint64_t seed = mix(seed_ ^ mix(++tensor_));
    const int first =
        126 - shift + static_cast<int>(std::floor(-std::log2(2.93 * std::sqrt(static_cast<double>(cols)))));
    constexpr size_t kChunk = size_t{1} << 16;  // bytes; a multiple of a word
    stream_.parallel_for((nibbles + kChunk - 1) / kChunk, [&](size_t chunk, int) {
      const size_t end = std::min(nibbles, (chunk + 1) * kChunk);  // a multiple of 16, as `cols` is of 32
      for (size_t at = chunk * kChunk; at < end; at += 16) {
        const uint64_t words[2] = {mix(seed + at), mix(seed + at + 8)};
        std::memcpy(data + at, words, sizeof words);
        data[nibbles + at / 16] = static_cast<std::byte>(first + static_cast<int>((words[0] ^ words[1]) >> 62));
      }
    });
    return {reinterpret_cast<const uint8_t*>(data), reinterpret_cast<const uint8_t*>(data) + nibbles};
  }

 private:
  std::byte* take(size_t bytes) {
    std::byte* data = memory_.data() + used_;
    used_ += aligned(bytes);
    MOELORA_ASSERT(used_ <= memory_.bytes());
    return data;
  }

  const AnonymousMemory& memory_;
  Dtype dtype_;
  uint64_t seed_;
  Stream& stream_;
  size_t used_ = 0;
  uint64_t tensor_ = 0;
};

// Sum over all planned tensors of `round(stored bytes)`; the largest value if 64 bits do not hold it.
template <class Round>
uint64_t planned_bytes(const ModelConfig& config, Weights& weights, const Round& round) {
  uint64_t bytes = 0;
  const auto add = [&](uint64_t more) {
    if (__builtin_add_overflow(bytes, more, &bytes)) {
      bytes = UINT64_MAX;
    }
  };
  for (const PlannedTensor& planned : plan_tensors(config, weights)) {
    add(round(matrix_bytes(config.dtype, planned.rows, planned.cols)));
  }
  for (int32_t i = 0; i < config.num_layers; ++i) {
    if (config.layer_is_moe[static_cast<size_t>(i)] == 0) {
      continue;
    }
    for (const PlannedExperts& planned : plan_experts(config, weights.layers[static_cast<size_t>(i)])) {
      const uint64_t one = expert_bytes(config.mxfp4_experts, config.dtype, planned.rows, planned.cols);
      add(round(static_cast<size_t>(one)) * static_cast<uint64_t>(config.num_experts));
    }
  }
  return bytes;
}

// As a file holds them: gate and up of an expert by turns in one matrix.
void fill_mxfp4_experts(const ModelConfig& config, LayerWeights& layer, Filler& filler) {
  std::vector<Mxfp4Rows> gate_up;
  std::vector<Mxfp4Rows> down;
  for (int32_t e = 0; e < config.num_experts; ++e) {
    gate_up.push_back(filler.fill_mxfp4(2 * config.moe_intermediate_size, config.hidden_size, 0));
    down.push_back(filler.fill_mxfp4(config.hidden_size, config.moe_intermediate_size, kRandomDownShift));
  }
  set_mxfp4_experts(config, gate_up, down, layer);
}

}  // namespace

AnonymousMemory::AnonymousMemory(size_t bytes, const std::string& purpose) : bytes_(bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    throw Error(Status::kNomem, fmt::format("{}: no memory for {} bytes", purpose, bytes));
  }
  data_ = static_cast<std::byte*>(data);
  ::madvise(data, bytes, MADV_HUGEPAGE);  // a wish; fewer TLB misses in a step
  ::madvise(data, bytes, MADV_DONTDUMP);  // gigabytes of noise are of no use in the host's core dump
}

AnonymousMemory::~AnonymousMemory() {
  ::munmap(data_, bytes_);
}

std::unique_ptr<Weights> Weights::random(const ModelConfig& config, uint64_t seed) {
  std::unique_ptr<Weights> weights(new Weights);
  weights->layers.resize(static_cast<size_t>(config.num_layers));
  const uint64_t bytes = planned_bytes(config, *weights, [](size_t stored) { return uint64_t{aligned(stored)}; });
  weights->bytes_ = weight_bytes_of_config(config);
  weights->storage_->memory.push_back(std::make_unique<AnonymousMemory>(static_cast<size_t>(bytes), "random weights"));

  Stream stream(weight_threads(), 0);
  Filler filler(*weights->storage_->memory.back(), config.dtype, seed, stream);
  for (const PlannedTensor& planned : plan_tensors(config, *weights)) {
    *planned.weight = {filler.fill(planned.kind, planned.rows, planned.cols), config.dtype, planned.rows, planned.cols};
  }
  for (int32_t i = 0; i < config.num_layers; ++i) {
    LayerWeights& layer = weights->layers[static_cast<size_t>(i)];
    if (config.layer_is_moe[static_cast<size_t>(i)] == 0) {
      continue;
    }
    if (config.mxfp4_experts) {
      fill_mxfp4_experts(config, layer, filler);
      convert_vectors(layer);
      continue;
    }
    for (const PlannedExperts& planned : plan_experts(config, layer)) {
      planned.data->resize(static_cast<size_t>(config.num_experts));
      for (const void*& matrix : *planned.data) {
        matrix = filler.fill(TensorKind::kMatrix, planned.rows, planned.cols);
      }
      *planned.weights = {planned.data->data(), config.dtype, planned.rows, planned.cols};
    }
    convert_vectors(layer);
  }
  if (config.tie_embeddings) {
    weights->lm_head = weights->embedding;
  }
  return weights;
}

std::unique_ptr<Weights> Weights::shapes(const ModelConfig& config) {
  std::unique_ptr<Weights> weights(new Weights);
  weights->layers.resize(static_cast<size_t>(config.num_layers));
  weights->bytes_ = weight_bytes_of_config(config);
  for (const PlannedTensor& planned : plan_tensors(config, *weights)) {
    *planned.weight = {nullptr, config.dtype, planned.rows, planned.cols};
  }
  for (LayerWeights& layer : weights->layers) {
    for (const PlannedExperts& planned : plan_experts(config, layer)) {
      *planned.weights = {nullptr, config.dtype, planned.rows, planned.cols};
      if (config.mxfp4_experts) {
        planned.weights->format = ExpertFormat::kMxfp4Rows;
      }
    }
  }
  return weights;
}

void Weights::choose_routing(const ModelConfig& config, const RandomRouting& routing, uint64_t seed) {
  const std::vector<float> ranked = ranked_offsets(routing, config.num_experts, config.top_k);
  for (int32_t i = 0; i < config.num_layers; ++i) {
    LayerWeights& layer = layers[static_cast<size_t>(i)];
    if (!ranked.empty() && config.layer_is_moe[static_cast<size_t>(i)] != 0) {
      layer.router_offsets = layer_offsets(ranked, i, seed);
      layer.router_bias = {layer.router_offsets.data(), Dtype::kF32, 1, config.num_experts};
    }
  }
}

uint64_t weight_bytes_of_config(const ModelConfig& config) {
  Weights weights;
  weights.layers.resize(static_cast<size_t>(config.num_layers));
  return planned_bytes(config, weights, [](size_t stored) { return uint64_t{stored}; });
}

}  // namespace moelora
