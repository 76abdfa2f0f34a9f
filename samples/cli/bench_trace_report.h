// SPDX-License-Identifier: Apache-2.0
// What `moelora bench --trace` was asked and what it measured, with the metrics of S-LoRA's evaluation: runs of one
// repeat are compared with each other, because the speed of a shared machine changes from minute to minute.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "samples/cli/slora_trace.h"

namespace moelora_cli {

struct TraceFlags {
  std::string name;        // of the trace; empty: none is asked for
  SloraWorkload workload;  // its num_adapters is set for each run
  std::vector<int64_t> input_range = {8, 512}, output_range = {8, 512};
  std::vector<int64_t> adapters = {0};
  std::string adapter_dir;  // holds an adapter 0, 1, ... for each; empty: random ones in memory
  bool lazy = false;        // with adapter_dir
  int32_t rank = 8;
  uint32_t targets = 0;  // MOELORA_RANDOM_*
  int64_t repeat = 1;
  double slo_seconds = 6;
  double strip_seconds = -1;  // -1: a twelfth of the duration
  bool json = false;
};

// One request as its client saw it; seconds from the start of the run.
struct TraceTimes {
  double arrival = 0;           // when it was due
  double first = -1, end = -1;  // -1: refused, or ended by an error
};

struct TraceRun {
  int64_t adapters = 0;
  int64_t repeat = 0;
  int64_t adapters_touched = 0;
  std::vector<TraceTimes> times;
  int64_t output_tokens = 0;
  double seconds = 0;       // from the start to the last end
  double cpu_seconds = 0;   // of all threads meanwhile
  double load_seconds = 0;  // for registering the adapters, before the start
  uint64_t steps = 0, adapter_loads = 0, adapter_hits = 0, adapter_evictions = 0, preemptions = 0;
  double mean_step_ms = 0, mean_rows = 0, mean_step_adapters = 0;
  std::string first_error;
};

struct TraceMetrics {
  int64_t finished = 0, failed = 0;
  double throughput = 0;        // finished requests / whole time, drain included
  double strip_throughput = 0;  // those that ended within the run without strip_seconds at each end, over that time
  double output_tokens_per_s = 0;
  double latency = 0, first_token = 0;  // means, seconds
  double first_token_p99 = 0;
  double slo_attainment = 0;  // share of first tokens within the SLO; what failed has none
  double satisfaction = 0;    // mean of max(0, 1 - (first token / SLO)^2)
};

TraceMetrics trace_metrics(const TraceRun& run, double slo_seconds, double strip_seconds);
double strip_seconds(const TraceFlags& flags);

// Throughput with `adapters` of that with `others`, repeat by repeat.
struct TraceRatio {
  int64_t adapters = 0, others = 0;
  std::vector<double> each;
  double median = 0;
};
// Each number of adapters against those asked before it.
std::vector<TraceRatio> trace_ratios(const TraceFlags& flags, const std::vector<TraceRun>& runs);

std::string trace_table(const TraceFlags& flags, const std::vector<TraceRun>& runs);
std::string trace_json(const TraceFlags& flags, const std::vector<TraceRun>& runs);

}  // namespace moelora_cli
