// SPDX-License-Identifier: Apache-2.0
// The experts of gpt-oss (formats.md A2). The published form, MXFP4, is used where it lies in the file, gate and up as
// the even and the odd rows of one matrix; its scales are read once to refuse NaN. The form of bf16 re-uploads is
// [in, out]: it is transposed into memory of ours, and the file's pages are let go.
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <thread>

#include <fmt/format.h>

#include "kernels/base/error.h"
#include "runtime/io/json.h"
#include "runtime/model/weights_loader.h"

namespace moelora {
namespace {

constexpr int kThreadsMax = 64;
constexpr int32_t kGroup = 32;       // inputs of a scale
constexpr uint8_t kScaleNan = 0xff;  // E8M0

// out[n][i] = in[i][first + n * step] for the columns [begin, end) of `outputs`; in has `inputs` rows of `stride`.
struct Transposition {
  int64_t inputs;
  int64_t stride;
  int64_t first;
  int64_t step;
};

template <class Element>
void transpose(const std::byte* in, const Transposition& shape, int64_t begin, int64_t end, std::byte* out) {
  constexpr int64_t kBlock = 64;  // of inputs: as many reads of a line before it leaves the cache
  constexpr auto kBytes = static_cast<int64_t>(sizeof(Element));
  for (int64_t i = 0; i < shape.inputs; i += kBlock) {
    const int64_t count = std::min(kBlock, shape.inputs - i);
    for (int64_t n = begin; n < end; ++n) {
      const std::byte* from = in + (i * shape.stride + shape.first + n * shape.step) * kBytes;
      std::byte* to = out + (n * shape.inputs + i) * kBytes;
      for (int64_t k = 0; k < count; ++k) {
        std::memcpy(to + k * kBytes, from + k * shape.stride * kBytes, sizeof(Element));
      }
    }
  }
}

// The pages that lie wholly inside the range are not needed in memory any more.
void let_go(const std::byte* data, size_t bytes) {
  constexpr uintptr_t kPage = 4096;
  const auto begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  if (begin < end) {
    ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);  // a read-only file mapping: nothing is lost
  }
}

std::vector<float> to_floats(const Weight& weight, int64_t first, int64_t step) {
  const int64_t count = int64_t{weight.rows} * weight.cols;
  std::vector<float> values;
  values.reserve(static_cast<size_t>(count / step));
  for (int64_t i = first; i < count; i += step) {
    values.push_back(load_element(weight.data, weight.dtype, static_cast<size_t>(i)));
  }
  return values;
}

}  // namespace

int weight_threads() {
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, kThreadsMax);
}

void convert_vectors(LayerWeights& layer) {
  if (!layer.stored_sinks.empty()) {
    layer.sink_values = to_floats(layer.stored_sinks, 0, 1);
    layer.sinks = layer.sink_values.data();
  }
  if (!layer.stored_gate_up_bias.empty()) {
    layer.gate_bias_values = to_floats(layer.stored_gate_up_bias, 0, 2);
    layer.up_bias_values = to_floats(layer.stored_gate_up_bias, 1, 2);
    layer.down_bias_values = to_floats(layer.stored_down_bias, 0, 1);
    layer.expert_gate.bias = layer.gate_bias_values.data();
    layer.expert_up.bias = layer.up_bias_values.data();
    layer.expert_down.bias = layer.down_bias_values.data();
  }
}

void set_mxfp4_experts(const ModelConfig& config, const std::vector<Mxfp4Rows>& gate_up,
                       const std::vector<Mxfp4Rows>& down, LayerWeights& layer) {
  const std::vector<PlannedExperts> planned = plan_experts(config, layer);
  for (size_t m = 0; m < planned.size(); ++m) {
    const PlannedExperts& projection = planned[m];
    const bool is_down = m == 2;
    const int64_t row = m == 1 ? 1 : 0;  // the first of this projection
    projection.data->clear();
    projection.scales->clear();
    for (const Mxfp4Rows& matrix : is_down ? down : gate_up) {
      projection.data->push_back(matrix.nibbles + row * projection.cols / 2);
      projection.scales->push_back(matrix.scales + row * projection.cols / kGroup);
    }
    ExpertWeights& weights = *projection.weights;
    weights = {projection.data->data(), Dtype::kBf16, projection.rows, projection.cols};
    weights.format = ExpertFormat::kMxfp4Rows;
    weights.row_step = is_down ? 1 : 2;
    weights.scales = projection.scales->data();
  }
}

void WeightsLoader::refuse_repacked() const {
  for (const auto& [name, stored] : checkpoint_.tensors()) {
    if (name.find(".experts.gate_up_projs.") != std::string::npos ||
        name.find(".experts.down_projs.") != std::string::npos) {
      throw Error(Status::kUnsupported,
                  fmt::format("{}: tensor '{}' belongs to a 4-bit re-packing of gpt-oss (bitsandbytes); supported: the "
                              "published MXFP4 form and bf16",
                              dir_, printable(name)));
    }
  }
}

void WeightsLoader::gpt_oss_experts(int32_t layer, LayerWeights& weights) {
  const std::string gate_up = fused_gate_up_name(layer);
  const std::string down = fused_down_name(layer);
  std::string packed;
  std::string plain;
  for (const std::string& name : {gate_up, down}) {
    for (const char* suffix : {"_blocks", "_scales"}) {
      packed = packed.empty() && checkpoint_.find(name + suffix) != nullptr ? name + suffix : packed;
    }
    plain = plain.empty() && checkpoint_.find(name) != nullptr ? name : plain;
  }
  if (!packed.empty() && !plain.empty()) {
    refuse_both(packed, plain);
  }
  if (!packed.empty() || (plain.empty() && config_.mxfp4_experts)) {
    mxfp4_experts(layer, weights);
  } else {
    transposed_experts(layer, weights);
  }
}

const StoredTensor* WeightsLoader::take_mxfp4(const std::string& name, const std::vector<int64_t>& shape, bool scales) {
  const StoredTensor* stored = checkpoint_.find(name);
  if (stored == nullptr) {
    missing_.push_back(name);
    return nullptr;
  }
  if (stored->dtype != "U8" && !(scales && stored->dtype == "F8_E8M0")) {
    throw Error(Status::kUnsupported, fmt::format("{}: tensor '{}' has dtype {}; supported: U8{}", dir_, name,
                                                  printable(stored->dtype), scales ? ", F8_E8M0" : ""));
  }
  check_shape(*stored, shape);
  use(*stored);
  return stored;
}

std::vector<Mxfp4Rows> WeightsLoader::mxfp4_matrices(const std::string& name, int32_t rows, int32_t cols) {
  if (cols % kGroup != 0) {
    throw Error(Status::kUnsupported,
                fmt::format("{}: tensor '{}_blocks': {} inputs are not a multiple of {}", dir_, name, cols, kGroup));
  }
  const int64_t experts = config_.num_experts;
  const int64_t groups = cols / kGroup;
  const StoredTensor* blocks = take_mxfp4(name + "_blocks", {experts, rows, groups, kGroup / 2}, false);
  const StoredTensor* scales = take_mxfp4(name + "_scales", {experts, rows, groups}, true);
  std::vector<Mxfp4Rows> matrices;
  for (int64_t e = 0; e < experts && blocks != nullptr && scales != nullptr; ++e) {
    matrices.push_back({reinterpret_cast<const uint8_t*>(blocks->data) + e * rows * groups * (kGroup / 2),
                        reinterpret_cast<const uint8_t*>(scales->data) + e * rows * groups});
  }
  if (scales != nullptr) {
    tasks_.emplace_back([this, scales](Stream& stream) {
      constexpr size_t kChunk = size_t{1} << 20;
      std::atomic<bool> found{false};
      stream.parallel_for((scales->bytes + kChunk - 1) / kChunk, [&](size_t chunk, int) {
        const size_t count = std::min(kChunk, scales->bytes - chunk * kChunk);
        if (std::memchr(scales->data + chunk * kChunk, kScaleNan, count) != nullptr) {
          found = true;
        }
      });
      if (found) {
        throw Error(Status::kCorrupt,
                    fmt::format("{}: tensor '{}' holds a scale of 255, which is NaN", dir_, scales->name));
      }
    });
  }
  return matrices;
}

void WeightsLoader::mxfp4_experts(int32_t layer, LayerWeights& weights) {
  const int32_t inner = config_.moe_intermediate_size;
  const std::vector<Mxfp4Rows> gate_up = mxfp4_matrices(fused_gate_up_name(layer), 2 * inner, config_.hidden_size);
  const std::vector<Mxfp4Rows> down = mxfp4_matrices(fused_down_name(layer), config_.hidden_size, inner);
  set_mxfp4_experts(config_, gate_up, down, weights);
}

void WeightsLoader::transposed_experts(int32_t layer, LayerWeights& weights) {
  const int64_t experts = config_.num_experts;
  const std::vector<PlannedExperts> planned = plan_experts(config_, weights);
  struct Parameter {
    std::string name;
    std::vector<PlannedExperts> projections;  // by turns along the outputs
  };
  const std::array<Parameter, 2> parameters = {
      {{fused_gate_up_name(layer), {planned[0], planned[1]}}, {fused_down_name(layer), {planned[2]}}}};
  for (const Parameter& parameter : parameters) {
    const auto step = static_cast<int64_t>(parameter.projections.size());
    const PlannedExperts& first = parameter.projections[0];
    Dtype dtype = Dtype::kBf16;
    const StoredTensor* stored = take(parameter.name, {experts, first.cols, first.rows * step}, &dtype);
    if (stored == nullptr) {
      continue;
    }
    tasks_.emplace_back([this, stored, dtype, step, projections = parameter.projections](Stream& stream) {
      const int64_t rows = projections[0].rows;
      const int64_t cols = projections[0].cols;
      const auto matrix = static_cast<size_t>(rows * cols) * dtype_bytes(dtype);
      storage_.memory.push_back(std::make_unique<AnonymousMemory>(stored->bytes, "experts of gpt-oss in rows"));
      std::byte* const memory = storage_.memory.back()->data();
      constexpr int64_t kRows = 64;
      const auto blocks = static_cast<size_t>((rows + kRows - 1) / kRows);
      const auto matrices = static_cast<size_t>(config_.num_experts * step);
      stream.parallel_for(matrices * blocks, [&](size_t item, int) {
        const size_t m = item / blocks;  // of expert m / step, projection m % step
        const auto begin = static_cast<int64_t>(item % blocks) * kRows;
        const Transposition shape{cols, rows * step, static_cast<int64_t>(m) % step, step};
        const std::byte* in = stored->data + m / static_cast<size_t>(step) * static_cast<size_t>(step) * matrix;
        const auto run = dtype == Dtype::kF32 ? transpose<uint32_t> : transpose<uint16_t>;
        run(in, shape, begin, std::min(rows, begin + kRows), memory + m * matrix);
      });
      let_go(stored->data, stored->bytes);
      for (size_t p = 0; p < projections.size(); ++p) {
        std::vector<const void*>& data = *projections[p].data;
        data.clear();
        for (size_t m = p; m < matrices; m += static_cast<size_t>(step)) {
          data.push_back(memory + m * matrix);
        }
        *projections[p].weights = {data.data(), dtype, projections[p].rows, projections[p].cols};
      }
    });
  }
}

void WeightsLoader::run_tasks() {
  if (tasks_.empty()) {
    return;
  }
  Stream stream(weight_threads(), 0);
  for (const auto& task : tasks_) {
    task(stream);
  }
}

}  // namespace moelora
