// SPDX-License-Identifier: Apache-2.0
// How much memory an engine takes and what its pool holds, from options and config.json alone. Engine::create sizes
// itself by the same functions.
#pragma once

#include <cstdint>

#include "runtime/engine/options.h"
#include "runtime/memory/kv_cache.h"
#include "runtime/model/config.h"

namespace moelora {

struct MemoryPlan {
  uint64_t weight_bytes = 0;
  uint64_t workspace_bytes = 0;
  uint64_t staging_bytes = 0;  // of adapters on their way to a GPU: host memory, page-locked
  uint64_t pool_bytes = 0;
  uint64_t kv_bytes_per_token = 0;
  uint64_t kv_bytes_full_context = 0;
  uint64_t adapter_bytes = 0;  // in whole pages
  uint64_t available_bytes = 0;
  int64_t kv_tokens_with_adapters = 0;
  int64_t adapters_fit = 0;
  int32_t max_context_tokens = 0;
  bool fits = false;
};

// Pages of the pool: device_memory_bytes, or the fraction of `free_bytes`, but not more than every sequence at full
// context and a GiB of adapters could use. Throws Error{kDeviceNomem} if not even one block fits.
int64_t plan_pool_pages(const EngineOptions& options, const KvGeometry& geometry, int64_t context_tokens,
                        uint64_t free_bytes);
bool is_cuda(const EngineOptions& options);
size_t cuda_index(const EngineOptions& options);  // N of "cuda:N", 0 of "cuda"
Dtype plan_kv_dtype(const EngineOptions& options);
int32_t plan_batch_tokens(const EngineOptions& options);
// Throws Error{kInvalid}, which names the option, where a step of so many rows has more than `max_pairs` pairs of row
// and expert (Kernels::max_pairs; 0: any number).
void check_batch_tokens(const ModelConfig& config, int32_t batch_tokens, int64_t max_pairs);
int32_t plan_adapter_slots(const EngineOptions& options);
int32_t plan_context_tokens(const EngineOptions& options, const ModelConfig& config);
// Bytes of an adapter's stream of one rank, bf16, on q, k, v, o and on every expert (dense models: the MLP).
uint64_t adapter_stream_bytes(const ModelConfig& config, int32_t rank);

MemoryPlan plan_memory(const EngineOptions& options, const ModelConfig& config, int32_t num_adapters, int32_t rank);

}  // namespace moelora
