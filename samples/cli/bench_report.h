// SPDX-License-Identifier: Apache-2.0
// What `moelora bench` measured, and how it is summed up: medians, and each ceiling compared with the decode steps
// around it, because the read bandwidth of a shared machine changes from second to second.
#pragma once

#include <moelora_experimental.h>

#include <cstdint>
#include <string>
#include <vector>

namespace moelora_cli {

struct Ceiling {
  double at_ms = 0;  // when it was taken
  double bytes_per_second = 0;
};

// Means of the adapters' loads; of the upload over those that were on the device.
struct AdapterLoads {
  double read_ms = 0, pack_ms = 0, upload_ms = 0, bytes = 0;
};

struct BenchMeasurements {
  int64_t concurrency = 0;
  int64_t adapters = 0;
  int64_t requests = 0;
  std::string routing;
  int64_t input_tokens = 0, output_tokens = 0;  // of all finished requests
  double seconds = 0;                           // without the time that the ceilings took
  std::vector<double> ttft_ms, inter_token_ms;
  std::vector<moelora_step_record> steps;
  std::vector<double> step_weight_bytes;  // of each step
  std::vector<Ceiling> ceilings;
  AdapterLoads loads;
};

struct BenchReport {
  double output_tokens_per_s = 0, decode_tokens_per_s = 0, prefill_tokens_per_s = 0;
  double ttft_ms = 0, ttft_p99_ms = 0, inter_token_ms = 0, inter_token_p99_ms = 0;
  double step_ms = 0, step_bytes = 0, active_experts = 0, adapters_touched = 0;
  double ceiling_gb_per_s = 0, ceiling_ratio = 0;
  size_t decode_steps = 0, pairs = 0;
};

double quantile(std::vector<double> values, double fraction);  // 0 of nothing
BenchReport sum_up(const BenchMeasurements& measured);
std::string report_table(const BenchMeasurements& measured, const BenchReport& report);
std::string report_json(const BenchMeasurements& measured, const BenchReport& report);

}  // namespace moelora_cli
