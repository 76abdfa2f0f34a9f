// SPDX-License-Identifier: Apache-2.0
// See bench_report.h.
#include "samples/cli/bench_report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

namespace moelora_cli {
namespace {

double median(const std::vector<double>& values) {
  return quantile(values, 0.5);
}

// Pure decode steps with every stream in them; where there is none (fewer requests than streams), all pure ones.
std::vector<size_t> decode_steps(const BenchMeasurements& measured) {
  std::vector<size_t> full, pure;
  for (size_t i = 0; i < measured.steps.size(); ++i) {
    const moelora_step_record& step = measured.steps[i];
    if (step.prefill_rows == 0 && step.rows > 0) {
      pure.push_back(i);
      if (step.sequences == measured.concurrency) {
        full.push_back(i);
      }
    }
  }
  return full.empty() ? pure : full;
}

double step_bytes(const BenchMeasurements& measured, size_t i) {
  return measured.step_weight_bytes[i] + measured.steps[i].lora_bytes + measured.steps[i].kv_bytes;
}

// Each ceiling against the steps between its neighbours.
std::vector<double> pair_ratios(const BenchMeasurements& measured, const std::vector<size_t>& decode) {
  std::vector<double> ratios;
  const std::vector<Ceiling>& ceilings = measured.ceilings;
  for (size_t c = 0; c < ceilings.size(); ++c) {
    const double from = c == 0 ? -INFINITY : ceilings[c - 1].at_ms;
    const double to = c + 1 == ceilings.size() ? INFINITY : ceilings[c + 1].at_ms;
    std::vector<double> rates;
    for (const size_t i : decode) {
      if (measured.steps[i].start_ms > from && measured.steps[i].start_ms < to) {
        rates.push_back(step_bytes(measured, i) / (measured.steps[i].ms / 1e3));
      }
    }
    if (!rates.empty()) {
      ratios.push_back(median(rates) / ceilings[c].bytes_per_second);
    }
  }
  return ratios;
}

double prefill_rate(const BenchMeasurements& measured) {
  double rows = 0, ms = 0;
  for (const moelora_step_record& step : measured.steps) {
    if (step.prefill_rows > 0 && step.prefill_rows == step.rows) {
      rows += step.rows;
      ms += step.ms;
    }
  }
  return ms == 0 ? 0 : rows / (ms / 1e3);
}

}  // namespace

double quantile(std::vector<double> values, double fraction) {
  if (values.empty()) {
    return 0;
  }
  std::sort(values.begin(), values.end());
  const double at = fraction * static_cast<double>(values.size() - 1);
  const auto low = static_cast<size_t>(at);
  const size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (at - static_cast<double>(low)) * (values[high] - values[low]);
}

BenchReport sum_up(const BenchMeasurements& measured) {
  BenchReport report;
  const std::vector<size_t> decode = decode_steps(measured);
  std::vector<double> ms, bytes, experts, touched, rows;
  for (const size_t i : decode) {
    ms.push_back(measured.steps[i].ms);
    bytes.push_back(step_bytes(measured, i));
    experts.push_back(measured.steps[i].active_experts);
    touched.push_back(measured.steps[i].adapters);
    rows.push_back(measured.steps[i].rows);
  }
  report.decode_steps = decode.size();
  report.step_ms = median(ms);
  report.step_bytes = median(bytes);
  report.adapters_touched = median(touched);
  for (const double count : experts) {
    report.active_experts += count / static_cast<double>(experts.size());
  }
  report.output_tokens_per_s =
      measured.seconds > 0 ? static_cast<double>(measured.output_tokens) / measured.seconds : 0;
  report.decode_tokens_per_s = report.step_ms > 0 ? median(rows) / (report.step_ms / 1e3) : 0;
  report.prefill_tokens_per_s = prefill_rate(measured);
  report.ttft_ms = median(measured.ttft_ms);
  report.ttft_p99_ms = quantile(measured.ttft_ms, 0.99);
  report.inter_token_ms = median(measured.inter_token_ms);
  report.inter_token_p99_ms = quantile(measured.inter_token_ms, 0.99);
  std::vector<double> ceilings;
  for (const Ceiling& ceiling : measured.ceilings) {
    ceilings.push_back(ceiling.bytes_per_second / 1e9);
  }
  const std::vector<double> ratios = pair_ratios(measured, decode);
  report.ceiling_gb_per_s = median(ceilings);
  report.ceiling_ratio = median(ratios);
  report.pairs = ratios.size();
  return report;
}

std::string report_table(const BenchMeasurements& measured, const BenchReport& report) {
  std::string table;
  const auto row = [&table](const char* name, const char* format, double a, double b = 0) {
    char value[96], text[160];
    std::snprintf(value, sizeof(value), format, a, b);
    std::snprintf(text, sizeof(text), "  %-30s %s\n", name, value);
    table += text;
  };
  row("requests, streams", "%.0f, %.0f", static_cast<double>(measured.requests),
      static_cast<double>(measured.concurrency));
  row("adapters, in a step", "%.0f, %.0f", static_cast<double>(measured.adapters), report.adapters_touched);
  if (measured.adapters > 0) {
    const AdapterLoads& loads = measured.loads;
    char value[128];
    std::snprintf(value, sizeof(value), "%.1f ms read, %.1f pack, %.1f upload; %.1f MB, %.2f GB/s", loads.read_ms,
                  loads.pack_ms, loads.upload_ms, loads.bytes / 1e6,
                  loads.upload_ms > 0 ? loads.bytes / loads.upload_ms / 1e6 : 0);
    table += std::string("  an adapter's load, mean        ") + value + "\n";
  }
  row("output, whole time", "%.1f tokens/s", report.output_tokens_per_s);
  row("decode", "%.1f tokens/s", report.decode_tokens_per_s);
  row("prefill steps", "%.1f tokens/s", report.prefill_tokens_per_s);
  row("time to first token", "%.1f ms, p99 %.1f", report.ttft_ms, report.ttft_p99_ms);
  row("between tokens", "%.2f ms, p99 %.2f", report.inter_token_ms, report.inter_token_p99_ms);
  row("decode step", "%.3f ms (%.0f of them)", report.step_ms, static_cast<double>(report.decode_steps));
  row("bytes a decode step", "%.1f MB, %.1f experts a layer", report.step_bytes / 1e6, report.active_experts);
  row("ceiling: reading the weights", "%.2f GB/s (%.0f pairs)", report.ceiling_gb_per_s,
      static_cast<double>(report.pairs));
  row("decode of the ceiling", "%.1f %%", 100 * report.ceiling_ratio);
  return table;
}

std::string report_json(const BenchMeasurements& measured, const BenchReport& report) {
  const nlohmann::ordered_json json = {{"output_tokens_per_s", report.output_tokens_per_s},
                                       {"decode_tokens_per_s", report.decode_tokens_per_s},
                                       {"prefill_tokens_per_s", report.prefill_tokens_per_s},
                                       {"ttft_ms", report.ttft_ms},
                                       {"ttft_p99_ms", report.ttft_p99_ms},
                                       {"inter_token_ms", report.inter_token_ms},
                                       {"inter_token_p99_ms", report.inter_token_p99_ms},
                                       {"step_ms", report.step_ms},
                                       {"step_bytes", report.step_bytes},
                                       {"active_experts", report.active_experts},
                                       {"ceiling_gb_per_s", report.ceiling_gb_per_s},
                                       {"ceiling_ratio", report.ceiling_ratio},
                                       {"ceiling_pairs", report.pairs},
                                       {"adapters", measured.adapters},
                                       {"adapters_touched", report.adapters_touched},
                                       {"concurrency", measured.concurrency},
                                       {"requests", measured.requests},
                                       {"routing", measured.routing},
                                       {"input_tokens", measured.input_tokens},
                                       {"output_tokens", measured.output_tokens}};
  return json.dump();
}

}  // namespace moelora_cli
