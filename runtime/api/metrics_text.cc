// SPDX-License-Identifier: Apache-2.0
// Names follow Prometheus' conventions: base units in the name, _total for counters. Series of adapters are bounded by
// the option metrics_adapters; the engine's own counters are of all adapters together.
#include "runtime/api/metrics_text.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include <fmt/format.h>

#include "include/moelora.h"

namespace moelora::api {
namespace {

std::string escaped(const std::string& label) {
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

class Exposition {
 public:
  void head(const char* name, const char* type, const char* help) {
    print("# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
  }
  template <class Value>
  void metric(const char* name, const char* type, const char* help, const Value& value) {
    head(name, type, help);
    print("{} {}\n", name, value);
  }
  template <class Value>
  void sample(const char* name, const std::string& labels, const Value& value) {
    print("{}{{{}}} {}\n", name, labels, value);
  }
  void histogram(const char* name, const char* help, const Histogram& times) {
    head(name, "histogram", help);
    uint64_t count = 0;
    for (size_t i = 0; i < Histogram::kBounds.size(); ++i) {
      count += times.count(i);
      print("{}_bucket{{le=\"{}\"}} {}\n", name, Histogram::kBounds[i], count);
    }
    count += times.count(Histogram::kBounds.size());
    print("{}_bucket{{le=\"+Inf\"}} {}\n{}_sum {}\n{}_count {}\n", name, count, name, times.sum(), name, count);
  }
  [[nodiscard]] std::string take() { return std::move(text_); }

 private:
  template <class... Values>
  void print(fmt::format_string<const Values&...> format, const Values&... values) {
    fmt::format_to(std::back_inserter(text_), format, values...);
  }
  std::string text_;
};

void add_counters(Exposition& out, const EngineStats& stats) {
  const auto counter = [&](const char* name, const char* help, auto value) {
    out.metric(name, "counter", help, value);
  };
  counter("moelora_steps_total", "Engine steps.", stats.steps);
  counter("moelora_requests_submitted_total", "Requests submitted.", stats.requests_submitted);
  counter("moelora_requests_finished_total", "Requests ended, for any reason.", stats.requests_finished);
  counter("moelora_requests_cancelled_total", "Requests cancelled.", stats.requests_cancelled);
  counter("moelora_requests_failed_total", "Requests ended by an error.", stats.requests_failed);
  counter("moelora_prompt_tokens_total", "Prompt tokens computed.", stats.prompt_tokens);
  counter("moelora_cached_tokens_total", "Prompt tokens that were not computed again.", stats.cached_tokens);
  counter("moelora_output_tokens_total", "Tokens generated.", stats.output_tokens);
  counter("moelora_preemptions_total", "Sequences put back for lack of pages.", stats.preemptions);
  counter("moelora_swaps_total", "Preemptions whose KV went to host memory.", stats.swaps);
  counter("moelora_sessions_evicted_total", "Sessions whose KV was dropped.", stats.sessions_evicted);
  counter("moelora_adapter_loads_total", "Uploads of adapters to the device that were begun.", stats.adapter_loads);
  counter("moelora_adapter_load_bytes_total", "Bytes of adapters that arrived on the device.",
          stats.adapter_load_bytes);
  counter("moelora_adapter_host_loads_total", "Adapters read again from disk.", stats.adapter_host_loads);
  counter("moelora_adapter_host_evictions_total", "Host copies dropped.", stats.adapter_host_evictions);
  counter("moelora_adapter_evictions_total", "Adapters evicted from the device.", stats.adapter_evictions);
  counter("moelora_adapter_hits_total", "Requests whose adapter was on the device.", stats.adapter_hits);
}

void add_gauges(Exposition& out, const EngineStats& stats) {
  const auto gauge = [&](const char* name, const char* help, auto value) { out.metric(name, "gauge", help, value); };
  gauge("moelora_requests_running", "Requests running.", stats.running);
  gauge("moelora_requests_waiting", "Requests waiting.", stats.waiting);
  gauge("moelora_adapters_registered", "Adapters loaded by the host.", stats.adapters_registered);
  gauge("moelora_adapters_resident", "Adapters with a slot on the device.", stats.adapters_resident);
  gauge("moelora_adapters_loading", "Adapters on their way to the device.", stats.adapters_loading);
  gauge("moelora_sessions", "Open sessions.", stats.sessions);
  gauge("moelora_pages", "Pages of the pool.", stats.pages_total);
  gauge("moelora_pages_free", "Free pages.", stats.pages_free);
  gauge("moelora_pages_kv", "Pages that hold KV.", stats.pages_kv);
  gauge("moelora_pages_adapter", "Pages that hold adapters.", stats.pages_adapter);
  gauge("moelora_adapter_host_bytes", "Host copies of adapters.", stats.adapter_host_bytes);
  gauge("moelora_page_wasted_bytes", "Bytes of pages in use that nothing can use.", stats.page_bytes_wasted);
  gauge("moelora_kv_unfilled_bytes", "Bytes of blocks in use that no token has yet.", stats.kv_bytes_unfilled);
  gauge("moelora_adapters_in_host_memory", "Adapters with a host copy.", stats.adapters_in_host_memory);
  gauge("moelora_adapters_on_disk_only", "Adapters without a host copy.", stats.adapters_on_disk_only);
  gauge("moelora_active_experts", "Mean experts used in a MoE layer of a step.", stats.mean_active_experts());
  gauge("moelora_last_step_seconds", "Duration of the last step.", stats.last_step_ms / 1e3);
}

void add_histograms(Exposition& out, const EngineStats& stats) {
  out.histogram("moelora_step_seconds", "Duration of a step.", stats.step);
  out.histogram("moelora_queue_seconds", "From the submit of a request to its first step.", stats.queue);
  out.histogram("moelora_time_to_first_token_seconds", "From the submit of a request to its first token.",
                stats.first_token);
  out.histogram("moelora_request_seconds", "From the submit of a request to its end, for any reason.", stats.request);
}

struct Series {
  std::shared_ptr<Adapter> adapter;
  std::string labels;
  AdapterQueue queue;
};

// Those with the most requests, older ones first among equals; in order of loading.
std::vector<Series> adapter_series(EngineObject& object) {
  std::vector<std::pair<uint64_t, std::shared_ptr<Adapter>>> adapters;
  {
    const std::lock_guard<std::mutex> lock(object.mutex);
    for (const auto& [id, handle] : object.adapter_handles) {
      adapters.emplace_back(handle, object.adapters.find(handle));
    }
  }
  const auto order = [](const auto& a, const auto& b) { return a.second->id < b.second->id; };
  std::sort(adapters.begin(), adapters.end(), order);
  const auto most = static_cast<size_t>(object.engine->options().metrics_adapters);
  if (adapters.size() > most) {
    std::vector<uint64_t> requests;  // counters move while they are compared: look once
    for (const auto& [handle, adapter] : adapters) {
      requests.push_back(adapter->requests.load());
    }
    std::vector<size_t> ranked(adapters.size());
    for (size_t i = 0; i < ranked.size(); ++i) {
      ranked[i] = i;
    }
    std::stable_sort(ranked.begin(), ranked.end(), [&](size_t a, size_t b) { return requests[a] > requests[b]; });
    ranked.resize(most);
    std::sort(ranked.begin(), ranked.end());
    for (size_t i = 0; i < most; ++i) {
      adapters[i] = adapters[ranked[i]];
    }
    adapters.resize(most);
  }
  const std::vector<AdapterQueue> queues = object.engine->adapter_queues();
  std::vector<Series> series;
  for (const auto& [handle, adapter] : adapters) {
    Series one{adapter, fmt::format("adapter=\"{}\",id=\"{}\"", escaped(adapter->name), handle), {}};
    const auto queue =
        std::lower_bound(queues.begin(), queues.end(), adapter->id,
                         [](const AdapterQueue& entry, uint64_t wanted) { return entry.adapter < wanted; });
    if (queue != queues.end() && queue->adapter == adapter->id) {
      one.queue = *queue;
    }
    series.push_back(std::move(one));
  }
  return series;
}

void add_adapters(Exposition& out, EngineObject& object) {
  const std::vector<Series> all = adapter_series(object);
  const auto family = [&](const char* name, const char* type, const char* help, const auto& value) {
    out.head(name, type, help);
    for (const Series& one : all) {
      out.sample(name, one.labels, value(one));
    }
  };
  const auto counter = [&](const char* name, const char* help, std::atomic<uint64_t> Adapter::* field) {
    family(name, "counter", help, [field](const Series& one) { return ((*one.adapter).*field).load(); });
  };
  counter("moelora_adapter_requests_total", "Requests of an adapter.", &Adapter::requests);
  counter("moelora_adapter_prompt_tokens_total", "Prompt tokens computed with an adapter.", &Adapter::prompt_tokens);
  counter("moelora_adapter_output_tokens_total", "Tokens generated with an adapter.", &Adapter::tokens);
  counter("moelora_adapter_device_loads_total", "Uploads of an adapter to the device.", &Adapter::loads);
  counter("moelora_adapter_device_hits_total", "Requests that found an adapter on the device.", &Adapter::hits);
  family("moelora_adapter_resident", "gauge", "1 if an adapter is on the device.",
         [](const Series& one) { return one.adapter->slot.load() > 0 ? 1 : 0; });
  family("moelora_adapter_requests_running", "gauge", "Running requests of an adapter.",
         [](const Series& one) { return one.queue.running; });
  family("moelora_adapter_requests_waiting", "gauge", "Waiting requests of an adapter.",
         [](const Series& one) { return one.queue.waiting; });
}

}  // namespace

std::string metrics_text(EngineObject& object) {
  Exposition out;
  const EngineInfo& info = object.engine->info();
  out.head("moelora_engine_info", "gauge", "1; what runs where.");
  out.sample("moelora_engine_info",
             fmt::format("version=\"{}\",architecture=\"{}\",device=\"{}\"", moelora_version_string(),
                         escaped(info.config.architecture), escaped(info.device_name)),
             1);
  const EngineStats stats = object.engine->stats();
  add_counters(out, stats);
  add_gauges(out, stats);
  add_histograms(out, stats);
  add_adapters(out, object);
  return out.take();
}

}  // namespace moelora::api
