// SPDX-License-Identifier: Apache-2.0
// An adapter checked and packed: the byte stream of kernels/lora/adapter_layout.h in host memory, and what there is to
// say about it. Immutable after load; while a folder is read again, the stream grows from its start (`progress`).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/base/tensor.h"
#include "kernels/lora/adapter_layout.h"
#include "runtime/adapter/stream_progress.h"
#include "runtime/memory/host_memory.h"
#include "runtime/model/config.h"

namespace moelora {

enum class ExpertOrientation : uint8_t { kAuto, kNatural, kReversed };
enum class ExpertBLayout : uint8_t { kAuto, kRankMajor, kGroupedByExpert };

class LoadCache;

struct AdapterLoadOptions {
  int32_t max_rank = 256;  // option max_lora_rank
  bool lenient = false;    // unmatched tensors are counted instead of refused
  Compute compute = Compute::kExact;
  ExpertOrientation orientation = ExpertOrientation::kAuto;
  ExpertBLayout b_layout = ExpertBLayout::kAuto;
  int32_t num_threads = 1;           // that read and pack; the stream does not depend on it
  std::shared_ptr<LoadCache> cache;  // of one model; may be null
};

// What there is to say about an image without its bytes.
struct AdapterFacts {
  uint64_t stream_bytes = 0;          // whole granules
  int32_t max_rank = 0;               // largest rank of any module
  float alpha = 0.0f;                 // lora_alpha of the config
  int32_t rank = 0;                   // r of the config
  uint32_t modules = 0;               // bit i: LoraModule i; bit 16 + i: ExpertModule i
  int32_t num_layers = 0;             // layers with any pair
  int32_t num_experts = 0;            // most experts adapted in any layer
  int32_t num_tensors = 0;            // of the file, all used
  int32_t num_tensors_unmatched = 0;  // lenient load only
  std::string dtype;                  // "BF16", "F32", "F16", "mixed": as stored
  // Bytes of the matrices in the stream, over all layers: of dense modules, and of experts.
  uint64_t dense_matrix_bytes = 0;
  uint64_t expert_matrix_bytes = 0;
  uint64_t file_bytes = 0;
  uint64_t config_fingerprint = 0;  // of config bytes
  uint64_t header_fingerprint = 0;  // of them and the weights file's header
  uint64_t fingerprint = 0;         // of config and weights bytes; 0: the values were not read yet
  double read_ms = 0;               // opening the files, reading and checking their headers; 0 of a random one
  double pack_ms = 0;               // reading and checking the values and making the stream
  // Where it can be read again, and how. Empty: made from memory, or random.
  std::string dir;  // absolute
  AdapterLoadOptions options;
};

struct AdapterImage : AdapterFacts {
  HostBytes stream;
  StreamProgress progress;  // of the stream's bytes; an image that a load has returned is whole
  std::vector<std::string> warnings;
};

// PEFT folder: adapter_config.json + adapter_model.safetensors. Throws Error naming file, tensor or key:
// kIo, kCorrupt, kUnsupported (peft_type, DoRA, ... of formats.md B2/B9), kAdapterMismatch (shape, rank, base,
// unknown tensor). Each file is opened once, no byte of it read twice and none mapped, so that a host may overwrite
// it at any time; one that changes while it is read is refused with kIo.
std::shared_ptr<const AdapterImage> load_adapter_dir(const std::string& dir, const ModelConfig& config,
                                                     const AdapterLoadOptions& options);
// The same folder by its config and header alone: the image has no stream, its values are read and checked by the first
// reload_adapter. Errors but those of values.
std::shared_ptr<const AdapterImage> describe_adapter_dir(const std::string& dir, const ModelConfig& config,
                                                         const AdapterLoadOptions& options);
// Called once with an image whose stream is about to be filled: its progress says how far. The caller must end it with
// `finish` or `fail` when the load has ended.
using AdapterBegun = std::function<void(const std::shared_ptr<AdapterImage>&)>;
// The folder that `facts` are of, once more. kIo naming the file if its contents are others now. `begun` may be empty.
std::shared_ptr<const AdapterImage> reload_adapter(const AdapterFacts& facts, const ModelConfig& config,
                                                   const AdapterBegun& begun);
std::shared_ptr<const AdapterImage> load_adapter_memory(const std::string& config_json, const std::byte* weights,
                                                        size_t weights_bytes, const ModelConfig& config,
                                                        const AdapterLoadOptions& options);
// Random bf16 A and B of one rank on attention and/or experts (dense: MLP), for benchmarks.
std::shared_ptr<const AdapterImage> random_adapter(const ModelConfig& config, int32_t rank, bool attention,
                                                   bool experts, uint64_t seed);

}  // namespace moelora
