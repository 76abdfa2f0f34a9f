// SPDX-License-Identifier: Apache-2.0
// moelora.h, group "metrics", and the sampling defaults: numbers out of the engine into flat structs and text.
#include <algorithm>

#include "runtime/api/boundary.h"
#include "runtime/api/handles.h"
#include "runtime/api/metrics_text.h"

using namespace moelora;
using namespace moelora::api;

namespace {

moelora_stats to_stats(const EngineStats& stats) {
  moelora_stats out = {};
  out.steps = stats.steps;
  out.requests_submitted = stats.requests_submitted;
  out.requests_finished = stats.requests_finished;
  out.requests_cancelled = stats.requests_cancelled;
  out.requests_failed = stats.requests_failed;
  out.prompt_tokens = stats.prompt_tokens;
  out.cached_tokens = stats.cached_tokens;
  out.output_tokens = stats.output_tokens;
  out.preemptions = stats.preemptions;
  out.sessions_evicted = stats.sessions_evicted;
  out.adapter_loads = stats.adapter_loads;
  out.adapter_evictions = stats.adapter_evictions;
  out.adapter_hits = stats.adapter_hits;
  out.requests_running = stats.running;
  out.requests_waiting = stats.waiting;
  out.adapters_registered = stats.adapters_registered;
  out.adapters_resident = stats.adapters_resident;
  out.sessions = stats.sessions;
  out.pages_total = stats.pages_total;
  out.pages_free = stats.pages_free;
  out.pages_kv = stats.pages_kv;
  out.pages_adapter = stats.pages_adapter;
  out.adapter_host_bytes = stats.adapter_host_bytes;
  out.active_experts = stats.mean_active_experts();
  out.last_step_ms = stats.last_step_ms;
  out.page_bytes_wasted = stats.page_bytes_wasted;
  out.kv_bytes_unfilled = stats.kv_bytes_unfilled;
  out.adapters_in_host_memory = stats.adapters_in_host_memory;
  out.adapters_on_disk_only = stats.adapters_on_disk_only;
  out.adapter_host_loads = stats.adapter_host_loads;
  out.adapter_host_evictions = stats.adapter_host_evictions;
  out.adapter_read_ms = stats.adapter_read_ms;
  out.adapter_pack_ms = stats.adapter_pack_ms;
  out.adapter_upload_ms = stats.adapter_upload_ms;
  out.steps_ms = stats.steps_ms;
  out.adapters_loading = stats.adapters_loading;
  out.adapter_load_bytes = stats.adapter_load_bytes;
  out.swaps = stats.swaps;
  out.prefix_queries = stats.prefix_queries;
  out.prefix_query_tokens = stats.prefix_query_tokens;
  out.prefix_hit_tokens = stats.prefix_hit_tokens;
  out.prefix_evictions = stats.prefix_evictions;
  out.prefix_blocks = stats.prefix_blocks;
  out.pages_cached = stats.pages_cached;
  return out;
}

}  // namespace

moelora_status moelora_stats_get(moelora_engine* engine, moelora_stats* stats, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    check_struct(stats, "stats");
    write_struct(stats, to_stats(call->engine->stats()));
    return Status::kOk;
  });
}

moelora_status moelora_adapter_stats_get(moelora_engine* engine, moelora_adapter adapter, moelora_adapter_stats* stats,
                                         moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    check_struct(stats, "stats");
    const auto found = call->adapters.find(adapter);
    moelora_adapter_stats out = {};
    out.requests = found->requests.load();
    out.output_tokens = found->tokens.load();
    out.loads = found->loads.load();
    out.hits = found->hits.load();
    out.prompt_tokens = found->prompt_tokens.load();
    out.resident = found->slot.load() > 0 ? 1 : 0;
    const std::vector<AdapterQueue> queues = call->engine->adapter_queues();
    const auto queue =
        std::find_if(queues.begin(), queues.end(), [&](const AdapterQueue& one) { return one.adapter == found->id; });
    if (queue != queues.end()) {
      out.running = queue->running;
      out.waiting = queue->waiting;
    }
    write_struct(stats, out);
    return Status::kOk;
  });
}

moelora_status moelora_metrics_text(moelora_engine* engine, char* buf, size_t cap, size_t* n, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    const std::string text = metrics_text(*call);
    return copy_out(text.data(), text.size(), buf, cap, n);
  });
}

moelora_status moelora_timeline_write(moelora_engine* engine, const char* path, size_t path_len, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    call->engine->write_timeline(path_argument("path", path, path_len));
    return Status::kOk;
  });
}

void moelora_sampling_init_sized(moelora_sampling* sampling, size_t size) {
  const Sampling initial;
  moelora_sampling value = {};
  value.temperature = initial.temperature;
  value.top_k = initial.top_k;
  value.top_p = initial.top_p;
  value.min_p = initial.min_p;
  value.repetition_penalty = initial.repetition_penalty;
  value.presence_penalty = initial.presence_penalty;
  value.frequency_penalty = initial.frequency_penalty;
  value.seed = initial.seed;
  value.max_tokens = initial.max_tokens;
  value.min_tokens = initial.min_tokens;
  value.logprobs = initial.logprobs;
  value.n = 1;
  moelora_struct_init(sampling, size);
  if (sampling == nullptr || size < sizeof(uint32_t)) {
    return;
  }
  value.struct_size = sampling->struct_size;
  std::memcpy(sampling, &value, std::min(size, sizeof value));
}

moelora_status moelora_sampling_from_model(moelora_engine* engine, moelora_sampling* sampling, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    moelora_sampling initial;
    moelora_sampling_init(&initial);
    moelora_sampling value = read_struct(sampling, "sampling", initial);
    const ModelConfig& config = call->engine->info().config;
    if (config.default_temperature >= 0) {
      value.temperature = config.default_temperature;
    }
    if (config.default_top_p >= 0) {
      value.top_p = config.default_top_p;
    }
    if (config.default_top_k >= 0) {
      value.top_k = config.default_top_k;
    }
    if (config.default_repetition_penalty >= 0) {
      value.repetition_penalty = config.default_repetition_penalty;
    }
    write_struct(sampling, value);
    return Status::kOk;
  });
}
