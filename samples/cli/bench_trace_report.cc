// SPDX-License-Identifier: Apache-2.0
// See bench_trace_report.h.
#include "samples/cli/bench_trace_report.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "samples/cli/bench_report.h"

namespace moelora_cli {
namespace {

template <class... Values>
std::string printed(const char* format, Values... values) {
  char text[256];
  std::snprintf(text, sizeof(text), format, values...);
  return text;
}

const TraceRun* run_of(const std::vector<TraceRun>& runs, int64_t adapters, int64_t repeat) {
  const auto found = std::find_if(
      runs.begin(), runs.end(), [&](const TraceRun& run) { return run.adapters == adapters && run.repeat == repeat; });
  return found == runs.end() ? nullptr : &*found;
}

TraceMetrics metrics_of(const TraceFlags& flags, const TraceRun& run) {
  return trace_metrics(run, flags.slo_seconds, strip_seconds(flags));
}

// Median over the repeats of one number of adapters.
template <class Value>
double median_of(const std::vector<TraceRun>& runs, int64_t adapters, const Value& value) {
  std::vector<double> values;
  for (const TraceRun& run : runs) {
    if (run.adapters == adapters) {
      values.push_back(static_cast<double>(value(run)));
    }
  }
  return quantile(std::move(values), 0.5);
}

}  // namespace

double strip_seconds(const TraceFlags& flags) {
  return flags.strip_seconds >= 0 ? flags.strip_seconds : flags.workload.duration / 12;
}

TraceMetrics trace_metrics(const TraceRun& run, double slo_seconds, double strip_seconds) {
  TraceMetrics metrics;
  std::vector<double> first_tokens;
  int64_t inside = 0;
  for (const TraceTimes& times : run.times) {
    if (times.end < 0) {
      ++metrics.failed;
      continue;
    }
    ++metrics.finished;
    const double first = times.first - times.arrival;
    const double part = first / slo_seconds;
    first_tokens.push_back(first);
    metrics.latency += times.end - times.arrival;
    metrics.first_token += first;
    metrics.slo_attainment += first <= slo_seconds ? 1 : 0;
    metrics.satisfaction += std::max(0.0, 1 - part * part);
    inside += times.end >= strip_seconds && times.end <= run.seconds - strip_seconds ? 1 : 0;
  }
  const auto finished = static_cast<double>(std::max<int64_t>(metrics.finished, 1));
  metrics.latency /= finished;
  metrics.first_token /= finished;
  metrics.first_token_p99 = quantile(std::move(first_tokens), 0.99);
  const auto all = static_cast<double>(std::max<int64_t>(metrics.finished + metrics.failed, 1));
  metrics.slo_attainment /= all;
  metrics.satisfaction /= all;
  if (run.seconds > 0) {
    metrics.throughput = static_cast<double>(metrics.finished) / run.seconds;
    metrics.output_tokens_per_s = static_cast<double>(run.output_tokens) / run.seconds;
  }
  const double left = run.seconds - 2 * strip_seconds;
  metrics.strip_throughput = left > 0 ? static_cast<double>(inside) / left : 0;
  return metrics;
}

std::vector<TraceRatio> trace_ratios(const TraceFlags& flags, const std::vector<TraceRun>& runs) {
  std::vector<TraceRatio> ratios;
  for (size_t i = 0; i < flags.adapters.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      TraceRatio ratio{flags.adapters[i], flags.adapters[j], {}, 0};
      for (int64_t repeat = 0; repeat < flags.repeat; ++repeat) {
        const TraceRun* run = run_of(runs, ratio.adapters, repeat);
        const TraceRun* other = run_of(runs, ratio.others, repeat);
        const double base = other == nullptr ? 0 : metrics_of(flags, *other).throughput;
        if (run != nullptr && base > 0) {
          ratio.each.push_back(metrics_of(flags, *run).throughput / base);
        }
      }
      ratio.median = quantile(ratio.each, 0.5);
      ratios.push_back(ratio);
    }
  }
  return ratios;
}

std::string trace_table(const TraceFlags& flags, const std::vector<TraceRun>& runs) {
  const SloraWorkload& load = flags.workload;
  std::string table = printed(
      "%lld requests at %g a second (cv %g, alpha %g), %lld to %lld tokens in, %lld to %lld out; "
      "medians of %lld runs by turns\n",
      static_cast<long long>(load.rate * load.duration), load.rate, load.cv, load.alpha,
      static_cast<long long>(load.input_low), static_cast<long long>(load.input_end - 1),
      static_cast<long long>(load.output_low), static_cast<long long>(load.output_end - 1),
      static_cast<long long>(flags.repeat));
  table += printed("%8s %8s %8s %8s %9s %9s %9s %7s %7s %7s %7s %7s %8s\n", "adapters", "touched", "req/s", "strip",
                   "tokens/s", "latency", "first", "SLO", "satisf.", "loads", "hits", "rows", "step");
  for (const int64_t adapters : flags.adapters) {
    const auto metric = [&](double TraceMetrics::* field) {
      return median_of(runs, adapters, [&](const TraceRun& run) { return metrics_of(flags, run).*field; });
    };
    const auto median = [&](const auto& value) { return median_of(runs, adapters, value); };
    table += printed("%8lld %8.0f %8.2f %8.2f %9.1f %7.2f s %7.2f s %5.1f %% %7.3f %7.0f %7.0f %7.1f %5.2f ms\n",
                     static_cast<long long>(adapters), median([](const TraceRun& run) { return run.adapters_touched; }),
                     metric(&TraceMetrics::throughput), metric(&TraceMetrics::strip_throughput),
                     metric(&TraceMetrics::output_tokens_per_s), metric(&TraceMetrics::latency),
                     metric(&TraceMetrics::first_token), 100 * metric(&TraceMetrics::slo_attainment),
                     metric(&TraceMetrics::satisfaction), median([](const TraceRun& run) { return run.adapter_loads; }),
                     median([](const TraceRun& run) { return run.adapter_hits; }),
                     median([](const TraceRun& run) { return run.mean_rows; }),
                     median([](const TraceRun& run) { return run.mean_step_ms; }));
  }
  for (const TraceRatio& ratio : trace_ratios(flags, runs)) {
    table += printed("throughput with %lld adapters: %.1f %% of that with %lld", static_cast<long long>(ratio.adapters),
                     100 * ratio.median, static_cast<long long>(ratio.others));
    for (size_t i = 0; i < ratio.each.size() && ratio.each.size() > 1; ++i) {
      table += printed("%s%.1f", i == 0 ? " (" : ", ", 100 * ratio.each[i]);
    }
    table += ratio.each.size() > 1 ? ")\n" : "\n";
  }
  for (const TraceRun& run : runs) {
    if (!run.first_error.empty()) {
      table += printed("with %lld adapters %lld requests failed: ", static_cast<long long>(run.adapters),
                       static_cast<long long>(metrics_of(flags, run).failed)) +
               run.first_error + "\n";
    }
  }
  return table;
}

std::string trace_json(const TraceFlags& flags, const std::vector<TraceRun>& runs) {
  const SloraWorkload& load = flags.workload;
  using Json = nlohmann::ordered_json;
  Json list = Json::array(), ratios = Json::array();
  for (const TraceRun& run : runs) {
    const TraceMetrics metrics = metrics_of(flags, run);
    list.push_back({{"adapters", run.adapters},
                    {"repeat", run.repeat},
                    {"adapters_touched", run.adapters_touched},
                    {"finished", metrics.finished},
                    {"failed", metrics.failed},
                    {"seconds", run.seconds},
                    {"cpu_seconds", run.cpu_seconds},
                    {"load_seconds", run.load_seconds},
                    {"throughput", metrics.throughput},
                    {"strip_throughput", metrics.strip_throughput},
                    {"output_tokens", run.output_tokens},
                    {"output_tokens_per_s", metrics.output_tokens_per_s},
                    {"latency_s", metrics.latency},
                    {"first_token_s", metrics.first_token},
                    {"first_token_p99_s", metrics.first_token_p99},
                    {"slo_attainment", metrics.slo_attainment},
                    {"satisfaction", metrics.satisfaction},
                    {"steps", run.steps},
                    {"mean_step_ms", run.mean_step_ms},
                    {"mean_rows", run.mean_rows},
                    {"mean_step_adapters", run.mean_step_adapters},
                    {"adapter_loads", run.adapter_loads},
                    {"adapter_hits", run.adapter_hits},
                    {"adapter_evictions", run.adapter_evictions},
                    {"preemptions", run.preemptions}});
  }
  for (const TraceRatio& ratio : trace_ratios(flags, runs)) {
    ratios.push_back(
        {{"adapters", ratio.adapters}, {"of", ratio.others}, {"throughput", ratio.median}, {"each", ratio.each}});
  }
  const Json json = {{"trace", "slora"},
                     {"requests", static_cast<int64_t>(load.rate * load.duration)},
                     {"rate", load.rate},
                     {"duration", load.duration},
                     {"cv", load.cv},
                     {"alpha", load.alpha},
                     {"input_range", {load.input_low, load.input_end}},
                     {"output_range", {load.output_low, load.output_end}},
                     {"seed", load.seed},
                     {"slo_s", flags.slo_seconds},
                     {"strip_s", strip_seconds(flags)},
                     {"runs", list},
                     {"ratios", ratios}};
  return json.dump();
}

}  // namespace moelora_cli
