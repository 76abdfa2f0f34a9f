// SPDX-License-Identifier: Apache-2.0
#include "runtime/engine/memory_plan.h"

#include <algorithm>
#include <string>

#include "kernels/base/device.h"
#include "kernels/lora/adapter_layout.h"
#include "runtime/adapter/adapter_uploader.h"
#include "runtime/engine/apart.h"
#include "runtime/memory/host_resources.h"
#include "runtime/model/weights.h"
#include "runtime/model/workspace.h"

namespace moelora {
namespace {

// Room for adapters beside the KV of all sequences that may run.
constexpr uint64_t kAdapterAllowanceBytes = uint64_t{1} << 30;
// A GPU is there for this; a host's memory is not. Of a GPU adapters may take half of what is free: one of a mixture of
// experts is as large as a small model.
constexpr double kGpuFraction = 0.9;
constexpr double kGpuAdapterFraction = 0.5;
constexpr double kHostFraction = 0.25;
constexpr int64_t kPagesMax = int64_t{1} << 24;

uint64_t linear_granules(int32_t outputs, int32_t inputs, int32_t rank) {
  return static_cast<uint64_t>(matrix_granules(rank, inputs, Dtype::kBf16)) +
         static_cast<uint64_t>(matrix_granules(rank, outputs, Dtype::kBf16));
}

// Free bytes of what the options name, now.
uint64_t free_bytes_of(const EngineOptions& options) {
  if (!is_cuda(options)) {
    return host_resources().memory_free_bytes;
  }
  std::vector<DeviceInfo> gpus;
#ifdef MOELORA_HAVE_CUDA
  run_apart([&] { gpus = list_devices_cuda(); });
#endif
  const size_t index = cuda_index(options);
  if (index >= gpus.size()) {
    throw Error(Status::kNoDevice,
                "device '" + options.device + "': there are " + std::to_string(gpus.size()) + " GPUs");
  }
  return gpus[index].memory_free_bytes;
}

}  // namespace

size_t cuda_index(const EngineOptions& options) {
  const size_t prefix = std::string("cuda:").size();
  return options.device.size() > prefix ? std::stoul(options.device.substr(prefix)) : 0;
}

bool is_cuda(const EngineOptions& options) {
  return options.device.compare(0, 4, "cuda") == 0;
}

Dtype plan_kv_dtype(const EngineOptions& options) {
  if (options.kv_dtype == "auto") {
    return is_cuda(options) ? Dtype::kBf16 : Dtype::kF32;
  }
  return options.kv_dtype == "bf16" ? Dtype::kBf16 : Dtype::kF32;
}

int32_t plan_batch_tokens(const EngineOptions& options) {
  const int64_t initial = is_cuda(options) ? 4096 : 512;
  const int64_t rows = options.max_batch_tokens > 0 ? options.max_batch_tokens : initial;
  // Every running sequence must have its decode row.
  return static_cast<int32_t>(std::max(rows, options.max_num_sequences));
}

void check_batch_tokens(const ModelConfig& config, int32_t batch_tokens, int64_t max_pairs) {
  const int64_t pairs = int64_t{batch_tokens} * config.top_k;
  if (max_pairs == 0 || config.num_experts == 0 || pairs <= max_pairs) {
    return;
  }
  throw Error(Status::kInvalid, "max_batch_tokens = " + std::to_string(batch_tokens) + ": with " +
                                    std::to_string(config.top_k) + " experts a token at most " +
                                    std::to_string(max_pairs / config.top_k) + " on this device");
}

int32_t plan_adapter_slots(const EngineOptions& options) {
  if (options.max_adapters_resident > 0) {
    return static_cast<int32_t>(options.max_adapters_resident);
  }
  // With fewer, whoever waits could get its adapter only after one that runs has ended, and its row would stay empty
  // for the steps of the load.
  return static_cast<int32_t>(std::max<int64_t>(64, options.max_num_sequences + options.prefetch_requests));
}

int32_t plan_context_tokens(const EngineOptions& options, const ModelConfig& config) {
  if (options.max_context_tokens == 0) {
    return config.max_position;
  }
  return static_cast<int32_t>(std::min<int64_t>(options.max_context_tokens, config.max_position));
}

int64_t plan_pool_pages(const EngineOptions& options, const KvGeometry& geometry, int64_t context_tokens,
                        uint64_t free_bytes) {
  auto bytes = static_cast<double>(options.device_memory_bytes);
  if (options.device_memory_bytes == 0) {
    const double for_adapters = std::max(static_cast<double>(kAdapterAllowanceBytes),
                                         is_cuda(options) ? static_cast<double>(free_bytes) * kGpuAdapterFraction : 0);
    const double useful = static_cast<double>(geometry.pages(context_tokens)) *
                              static_cast<double>(options.max_num_sequences) *
                              static_cast<double>(geometry.page_bytes) +
                          for_adapters;
    double fraction = options.device_memory_fraction;
    if (fraction == 0) {
      fraction = is_cuda(options) ? kGpuFraction : kHostFraction;
    }
    bytes = std::min(static_cast<double>(free_bytes) * fraction, useful);
  }
  const auto pages = static_cast<int64_t>(bytes / static_cast<double>(geometry.page_bytes));
  if (pages < geometry.layout.num_groups) {
    throw Error(Status::kDeviceNomem, "device_memory_bytes: " + std::to_string(static_cast<int64_t>(bytes)) +
                                          " bytes do not hold one KV block (" +
                                          std::to_string(geometry.layout.num_groups) + " pages of " +
                                          std::to_string(geometry.page_bytes) + " bytes)");
  }
  return std::min(pages, kPagesMax);
}

uint64_t adapter_stream_bytes(const ModelConfig& config, int32_t rank) {
  const int32_t q_width = config.num_heads * config.head_dim;
  const int32_t kv_width = config.num_kv_heads * config.head_dim;
  const int32_t hidden = config.hidden_size;
  const uint64_t attention = linear_granules(q_width, hidden, rank) + 2 * linear_granules(kv_width, hidden, rank) +
                             linear_granules(hidden, q_width, rank);
  const auto mlp = [&](int32_t width) {
    return 2 * linear_granules(width, hidden, rank) + linear_granules(hidden, width, rank);
  };
  const uint64_t directory_bytes = static_cast<uint64_t>(config.num_layers) * 2 * sizeof(int32_t);
  uint64_t granules = (directory_bytes + kGranuleBytes - 1) / kGranuleBytes;
  for (size_t layer = 0; layer < static_cast<size_t>(config.num_layers); ++layer) {
    granules += 1 + attention;  // the dense records
    if (config.num_experts > 0 && config.layer_is_moe[layer] != 0) {
      const auto experts = static_cast<uint64_t>(config.num_experts);
      granules += (experts * kNumExpertModules * sizeof(LoraRecord) + kGranuleBytes - 1) / kGranuleBytes;
      granules += experts * mlp(config.moe_intermediate_size);
    } else {
      granules += mlp(config.intermediate_size);
    }
  }
  return granules * kGranuleBytes;
}

MemoryPlan plan_memory(const EngineOptions& options, const ModelConfig& config, int32_t num_adapters, int32_t rank) {
  MemoryPlan plan;
  plan.available_bytes = free_bytes_of(options);
  plan.max_context_tokens = plan_context_tokens(options, config);
  plan.weight_bytes = weight_bytes_of_config(config);
  const int32_t rows = plan_batch_tokens(options);
  const auto rank_limit = static_cast<int32_t>((options.max_lora_rank + 7) / 8 * 8);
  const auto sequences = static_cast<int32_t>(options.max_num_sequences);
  plan.workspace_bytes = Workspace::bytes_needed(config, WorkspaceLimits{rows, sequences, rank_limit},
                                                 is_cuda(options) ? Dtype::kBf16 : Dtype::kF32);
  const KvGeometry geometry = choose_kv_geometry(config.num_layers, config.num_kv_heads, config.head_dim,
                                                 static_cast<int32_t>(options.kv_block_tokens), plan_kv_dtype(options));
  const auto page_bytes = static_cast<uint64_t>(geometry.page_bytes);
  plan.staging_bytes = AdapterUploader::staging_bytes(geometry.page_bytes, !is_cuda(options));
  // A GPU's pool comes after weights and workspace; the CPU's weights are a mapped file.
  const uint64_t before = is_cuda(options) ? plan.weight_bytes + plan.workspace_bytes : 0;
  const uint64_t left_for_pool = plan.available_bytes - std::min(plan.available_bytes, before);
  const int64_t pages = plan_pool_pages(options, geometry, plan.max_context_tokens, left_for_pool);
  plan.pool_bytes = static_cast<uint64_t>(pages) * page_bytes;
  plan.kv_bytes_per_token =
      static_cast<uint64_t>(geometry.layout.num_groups) * page_bytes / static_cast<uint64_t>(options.kv_block_tokens);
  const int64_t context_pages = geometry.pages(plan.max_context_tokens);
  plan.kv_bytes_full_context = static_cast<uint64_t>(context_pages) * page_bytes;

  const uint64_t adapter_pages = (adapter_stream_bytes(config, rank) + page_bytes - 1) / page_bytes;
  plan.adapter_bytes = adapter_pages * page_bytes;
  const int64_t left = pages - static_cast<int64_t>(adapter_pages) * num_adapters;
  plan.kv_tokens_with_adapters = std::max<int64_t>(left, 0) / geometry.layout.num_groups * options.kv_block_tokens;
  plan.adapters_fit = std::max<int64_t>(pages - context_pages, 0) / static_cast<int64_t>(adapter_pages);
  plan.fits =
      left >= context_pages && plan.weight_bytes + plan.workspace_bytes + plan.pool_bytes <= plan.available_bytes;
  return plan;
}

}  // namespace moelora
