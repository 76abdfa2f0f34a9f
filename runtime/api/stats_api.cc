// SPDX-License-Identifier: Apache-2.0
// moelora.h, group "metrics", and the sampling defaults: numbers out of the engine into flat structs and text.
#include <iterator>

#include "runtime/api/boundary.h"
#include "runtime/api/handles.h"

using namespace moelora;
using namespace moelora::api;

namespace {

double mean_active_experts(const EngineStats& stats) {
  if (stats.moe_layer_steps == 0) {
    return 0.0;
  }
  return static_cast<double>(stats.active_expert_sum) / static_cast<double>(stats.moe_layer_steps);
}

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
  out.active_experts = mean_active_experts(stats);
  out.last_step_ms = stats.last_step_ms;
  out.prefix_queries = stats.prefix_queries;
  out.prefix_query_tokens = stats.prefix_query_tokens;
  out.prefix_hit_tokens = stats.prefix_hit_tokens;
  out.prefix_evictions = stats.prefix_evictions;
  out.prefix_blocks = stats.prefix_blocks;
  out.pages_cached = stats.pages_cached;
  return out;
}

// Prometheus text exposition, version 0.0.4.
class Exposition {
 public:
  template <class Value>
  void metric(const char* name, const char* type, const char* help, const Value& value) {
    head(name, type, help);
    fmt::format_to(std::back_inserter(text_), "{} {}\n", name, value);
  }
  void head(const char* name, const char* type, const char* help) {
    fmt::format_to(std::back_inserter(text_), "# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
  }
  void sample(const char* name, const std::string& adapter, uint64_t handle, uint64_t value) {
    fmt::format_to(std::back_inserter(text_), "{}{{adapter=\"{}\",id=\"{}\"}} {}\n", name, escaped(adapter), handle,
                   value);
  }
  [[nodiscard]] const std::string& text() const { return text_; }

 private:
  static std::string escaped(const std::string& label) {
    std::string out;
    for (const char c : label) {
      if (c == '\n') {
        out += "\\n";
        continue;
      }
      if (c == '\\' || c == '"') {
        out += '\\';
      }
      out += c;
    }
    return out;
  }
  std::string text_;
};

void add_engine(Exposition& out, const EngineStats& stats) {
  const auto counter = [&](const char* name, const char* help, uint64_t value) {
    out.metric(name, "counter", help, value);
  };
  const auto gauge = [&](const char* name, const char* help, auto value) { out.metric(name, "gauge", help, value); };
  counter("moelora_steps_total", "Engine steps.", stats.steps);
  counter("moelora_requests_submitted_total", "Requests submitted.", stats.requests_submitted);
  counter("moelora_requests_finished_total", "Requests ended, for any reason.", stats.requests_finished);
  counter("moelora_requests_cancelled_total", "Requests cancelled.", stats.requests_cancelled);
  counter("moelora_requests_failed_total", "Requests ended by an error.", stats.requests_failed);
  counter("moelora_prompt_tokens_total", "Prompt tokens.", stats.prompt_tokens);
  counter("moelora_cached_tokens_total", "Prompt tokens that were not computed again.", stats.cached_tokens);
  counter("moelora_output_tokens_total", "Tokens generated.", stats.output_tokens);
  counter("moelora_preemptions_total", "Sequences put back for lack of pages.", stats.preemptions);
  counter("moelora_sessions_evicted_total", "Sessions whose KV was dropped.", stats.sessions_evicted);
  counter("moelora_adapter_loads_total", "Adapters brought to the device.", stats.adapter_loads);
  counter("moelora_adapter_evictions_total", "Adapters evicted from the device.", stats.adapter_evictions);
  counter("moelora_adapter_hits_total", "Requests whose adapter was on the device.", stats.adapter_hits);
  gauge("moelora_requests_running", "Requests running.", stats.running);
  gauge("moelora_requests_waiting", "Requests waiting.", stats.waiting);
  gauge("moelora_adapters_registered", "Adapters loaded by the host.", stats.adapters_registered);
  gauge("moelora_adapters_resident", "Adapters on the device.", stats.adapters_resident);
  gauge("moelora_sessions", "Open sessions.", stats.sessions);
  gauge("moelora_pages_total", "Pages of the pool.", stats.pages_total);
  gauge("moelora_pages_free", "Free pages.", stats.pages_free);
  gauge("moelora_pages_kv", "Pages that hold KV.", stats.pages_kv);
  gauge("moelora_pages_adapter", "Pages that hold adapters.", stats.pages_adapter);
  gauge("moelora_adapter_host_bytes", "Host copies of adapters.", stats.adapter_host_bytes);
  gauge("moelora_active_experts", "Mean experts used a MoE layer and step.", mean_active_experts(stats));
  gauge("moelora_last_step_milliseconds", "Duration of the last step.", stats.last_step_ms);
}

void add_adapters(Exposition& out, EngineObject& object) {
  std::vector<std::pair<uint64_t, std::shared_ptr<Adapter>>> adapters;
  {
    const std::lock_guard<std::mutex> lock(object.mutex);
    for (const auto& [id, handle] : object.adapter_handles) {
      adapters.emplace_back(handle, object.adapters.find(handle));
    }
  }
  struct Family {
    const char* name;
    const char* help;
    std::atomic<uint64_t> Adapter::* counter;
  };
  static constexpr Family kFamilies[] = {
      {"moelora_adapter_requests_total", "Requests of an adapter.", &Adapter::requests},
      {"moelora_adapter_output_tokens_total", "Tokens generated with an adapter.", &Adapter::tokens},
      {"moelora_adapter_device_loads_total", "Times an adapter was brought to the device.", &Adapter::loads},
      {"moelora_adapter_device_hits_total", "Requests that found an adapter on the device.", &Adapter::hits},
  };
  for (const Family& family : kFamilies) {
    out.head(family.name, "counter", family.help);
    for (const auto& [handle, adapter] : adapters) {
      out.sample(family.name, adapter->name, handle, ((*adapter).*family.counter).load());
    }
  }
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
    write_struct(stats, out);
    return Status::kOk;
  });
}

moelora_status moelora_metrics_text(moelora_engine* engine, char* buf, size_t cap, size_t* n, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    Exposition out;
    add_engine(out, call->engine->stats());
    add_adapters(out, *call);
    return copy_out(out.text().data(), out.text().size(), buf, cap, n);
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
