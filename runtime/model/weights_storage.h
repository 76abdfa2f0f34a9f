// SPDX-License-Identifier: Apache-2.0
// What keeps the memory of Weights alive: the mapped checkpoint, or anonymous mappings (all random values in one;
// transposed experts, one a tensor). Private to weights*.cc.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "runtime/io/safetensors.h"
#include "runtime/memory/device_memory.h"
#include "runtime/model/weights.h"

namespace moelora {

// Zero pages in huge-page friendly memory, released with the object.
class AnonymousMemory {
 public:
  // Throws Error{kNomem} that says what the memory was for.
  AnonymousMemory(size_t bytes, const std::string& purpose);
  ~AnonymousMemory();
  AnonymousMemory(const AnonymousMemory&) = delete;
  AnonymousMemory& operator=(const AnonymousMemory&) = delete;
  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// Of random models: well below the embedding's 1/sqrt(H), or all tokens would look alike and choose the same experts.
constexpr float kRandomBias = 0.002f;
// And so that gpt-oss's activation, which is not centred, does not: exponent taken from random MXFP4 down projections.
constexpr int kRandomDownShift = 7;

struct Weights::Storage {
  std::unique_ptr<Checkpoint> checkpoint;
  std::vector<std::unique_ptr<AnonymousMemory>> memory;
  DeviceMemory device;
};

// Threads for work at load.
int weight_threads();

// The matrix of one expert, and its scales.
struct Mxfp4Rows {
  const uint8_t* nibbles = nullptr;
  const uint8_t* scales = nullptr;
};
// Views of a layer's experts, [E] each; gate and up are the even and the odd rows of `gate_up`.
void set_mxfp4_experts(const ModelConfig& config, const std::vector<Mxfp4Rows>& gate_up,
                       const std::vector<Mxfp4Rows>& down, LayerWeights& layer);

// fp32 copies of a layer's sinks and expert biases, from their stored views.
void convert_vectors(LayerWeights& layer);

}  // namespace moelora
