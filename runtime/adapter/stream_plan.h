// SPDX-License-Identifier: Apache-2.0
// Which granule of an adapter's stream is whose, before any element is moved: directory, records and the places of all
// matrices and biases (kernels/lora/adapter_layout.h).
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "runtime/adapter/adapter_packer.h"
#include "runtime/adapter/adapter_tiles.h"

namespace moelora {

struct MatrixPlace {
  TiledMatrix matrix;
  int32_t granule = 0;
};

struct BiasPlace {
  const StoredTensor* tensor = nullptr;
  int32_t granule = 0;
};

struct StreamPlan {
  int64_t num_granules = 0;
  std::vector<int32_t> directory;
  std::vector<std::pair<int64_t, LoraRecord>> records;  // and the byte of the stream where each is
  std::vector<MatrixPlace> matrices;                    // by granule
  std::vector<std::pair<int64_t, int64_t>> gaps;        // first and end granule of what full tiles do not cover
  std::vector<BiasPlace> biases;

  [[nodiscard]] size_t bytes() const { return static_cast<size_t>(num_granules) * kGranuleBytes; }
  // Directory, records and zeros; matrices whose tiles are full are still what the memory held. Of `memory` if it is
  // large enough, of new memory otherwise.
  [[nodiscard]] HostBytes make_stream(HostBytes memory) const;
};

// Sorts `records` by layer, dense before experts, expert, module; their tensors must outlive the plan. Throws
// Error{kAdapterMismatch} naming tensors when two records are the same linear, {kUnsupported} if it is too large.
StreamPlan plan_stream(const ModelConfig& config, std::vector<AdapterRecord>& records, const std::string& file);

}  // namespace moelora
