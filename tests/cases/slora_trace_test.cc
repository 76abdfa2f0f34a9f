// SPDX-License-Identifier: Apache-2.0
// The trace of `moelora bench --trace slora` against what numpy.random.RandomState(42) gives for S-LoRA's benchmark,
// and the metrics on requests made up by hand.
#include "samples/cli/slora_trace.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "samples/cli/bench_trace_report.h"
#include "tests/support/catch.h"

using moelora_cli::count_adapters;
using moelora_cli::LegacyRandom;
using moelora_cli::slora_trace;
using moelora_cli::SloraWorkload;
using moelora_cli::trace_metrics;
using moelora_cli::trace_ratios;
using moelora_cli::TraceFlags;
using moelora_cli::TraceMetrics;
using moelora_cli::TraceRequest;
using moelora_cli::TraceRun;

namespace {

SloraWorkload main_table(int64_t num_adapters) {
  SloraWorkload workload;
  workload.num_adapters = num_adapters;
  return workload;
}

SloraWorkload sweep(double cv, double alpha) {
  SloraWorkload workload = main_table(200);
  workload.rate = 2;
  workload.duration = 300;
  workload.cv = cv;
  workload.alpha = alpha;
  return workload;
}

template <class Value>
std::vector<double> first_of(const std::vector<TraceRequest>& trace, size_t count, const Value& value) {
  std::vector<double> values;
  for (size_t i = 0; i < count; ++i) {
    values.push_back(static_cast<double>(value(trace[i])));
  }
  return values;
}

// In any second, wherever it begins.
int64_t most_in_one_second(const std::vector<TraceRequest>& trace) {
  size_t most = 0, first = 0;
  for (size_t i = 0; i < trace.size(); ++i) {
    while (trace[i].arrival - trace[first].arrival >= 1) {
      ++first;
    }
    most = std::max(most, i - first + 1);
  }
  return static_cast<int64_t>(most);
}

int64_t requests_of_first_adapter(const std::vector<TraceRequest>& trace) {
  return std::count_if(trace.begin(), trace.end(), [](const TraceRequest& request) { return request.adapter == 0; });
}

}  // namespace

TEST_CASE("the trace of S-LoRA's main table, draw by draw", "[slora_trace]") {
  const std::vector<TraceRequest> trace = slora_trace(main_table(1000));
  REQUIRE(trace.size() == 1200);
  CHECK(first_of(trace, 8, [](const TraceRequest& r) { return r.adapter; }) ==
        std::vector<double>{374, 950, 731, 598, 156, 155, 58, 866});
  CHECK(first_of(trace, 8, [](const TraceRequest& r) { return r.input; }) ==
        std::vector<double>{388, 467, 14, 36, 402, 40, 141, 374});
  CHECK(first_of(trace, 8, [](const TraceRequest& r) { return r.output; }) ==
        std::vector<double>{268, 357, 509, 359, 15, 327, 145, 45});
  CHECK(first_of(trace, 4, [](const TraceRequest& r) { return std::round(r.arrival * 1e6); }) ==
        std::vector<double>{50324, 87897, 103803, 170717});
  CHECK(std::fabs(trace.back().arrival - 124.98691596483738) < 1e-9);
  int64_t input = 0, output = 0;
  for (const TraceRequest& request : trace) {
    input += request.input;
    output += request.output;
  }
  CHECK(input == 314805);
  CHECK(output == 315809);
}

TEST_CASE("how many adapters a trace touches", "[slora_trace]") {
  for (const auto& [n, touched] : std::vector<std::pair<int64_t, int64_t>>{
           {5, 5}, {100, 100}, {200, 200}, {400, 384}, {500, 462}, {1000, 704}, {2000, 907}}) {
    INFO("n = " << n);
    CHECK(count_adapters(slora_trace(main_table(n))) == touched);
  }
  const std::vector<TraceRequest> base = slora_trace(main_table(0)), of_five = slora_trace(main_table(5));
  CHECK(count_adapters(base) == 0);
  for (size_t i = 0; i < base.size(); ++i) {  // all but the adapters is the same
    REQUIRE((base[i].adapter == -1 && base[i].arrival == of_five[i].arrival && base[i].input == of_five[i].input &&
             base[i].output == of_five[i].output));
  }
}

TEST_CASE("skewed adapters and bursts", "[slora_trace]") {
  struct Skew {
    double alpha;
    int64_t touched;
    double top;  // share of the first adapter
  };
  for (const Skew& skew : {Skew{0.1, 107, 0.57}, Skew{0.3, 163, 0.225}, Skew{0.6, 188, 0.048}}) {
    INFO("alpha = " << skew.alpha);
    const std::vector<TraceRequest> trace = slora_trace(sweep(1, skew.alpha));
    REQUIRE(trace.size() == 600);
    CHECK(count_adapters(trace) == skew.touched);
    CHECK(std::fabs(static_cast<double>(requests_of_first_adapter(trace)) / 600 - skew.top) < 0.005);
  }
  struct Burst {
    double cv;
    int64_t most;
    double last;
  };
  // cv = 1 takes the exponential's way, larger ones that of shapes below 1.
  for (const Burst& burst :
       {Burst{1, 8, 301}, Burst{2, 12, 285}, Burst{4, 37, 354}, Burst{6, 55, 343}, Burst{8, 74, 433}}) {
    INFO("cv = " << burst.cv);
    const std::vector<TraceRequest> trace = slora_trace(sweep(burst.cv, 1));
    CHECK(most_in_one_second(trace) == burst.most);
    CHECK(std::round(trace.back().arrival) == burst.last);
  }
  // Shapes above 1 take the third way: numpy's value.
  SloraWorkload even = main_table(5);
  even.cv = 0.5;
  CHECK(std::fabs(slora_trace(even).back().arrival - 120.66102142375174) < 1e-9);
}

TEST_CASE("the generator is MT19937", "[slora_trace]") {
  LegacyRandom random(5489);  // the reference implementation's seed: its first output is 3499211612
  CHECK(random.integer(0, int64_t{1} << 32) == 3499211612);
  LegacyRandom third(42);
  CHECK(third.uniform() == 0.3745401188473625);
}

TEST_CASE("metrics of a run", "[slora_trace]") {
  TraceRun run;
  // due, first token, end; the last one failed
  run.times = {{0.0, 1.0, 2.0}, {1.0, 4.0, 6.0}, {2.0, 8.0, 12.0}, {4.0, 16.0, 20.0}, {5.0, -1.0, -1.0}};
  run.seconds = 20;
  run.output_tokens = 100;
  const TraceMetrics metrics = trace_metrics(run, 6, 5);
  CHECK(metrics.finished == 4);
  CHECK(metrics.failed == 1);
  CHECK(metrics.throughput == 0.2);        // 4 in 20 s
  CHECK(metrics.strip_throughput == 0.2);  // those at 6 and 12 s, in 10 s
  CHECK(metrics.output_tokens_per_s == 5);
  CHECK(metrics.latency == (2 + 5 + 10 + 16) / 4.0);
  CHECK(metrics.first_token == (1 + 3 + 6 + 12) / 4.0);
  CHECK(metrics.slo_attainment == 3 / 5.0);                                    // 1, 3 and 6 s
  CHECK(std::fabs(metrics.satisfaction - (35.0 / 36 + 3.0 / 4) / 5) < 1e-12);  // 6 s is worth nothing, 12 s no less
}

TEST_CASE("runs of one repeat are compared with each other", "[slora_trace]") {
  TraceFlags flags;
  flags.adapters = {0, 5};
  flags.repeat = 3;
  std::vector<TraceRun> runs;
  const double seconds[3][2] = {{1, 2}, {10, 10}, {4, 5}};  // half, as fast, 80 %
  for (int64_t repeat = 0; repeat < 3; ++repeat) {
    for (int64_t i = 0; i < 2; ++i) {
      TraceRun run;
      run.adapters = flags.adapters[static_cast<size_t>(i)];
      run.repeat = repeat;
      run.times = {{0.0, 0.5, 1.0}};
      run.seconds = seconds[repeat][i];
      runs.insert(runs.begin(), run);
    }
  }
  const auto ratios = trace_ratios(flags, runs);
  REQUIRE(ratios.size() == 1);
  CHECK((ratios[0].adapters == 5 && ratios[0].others == 0));
  CHECK(ratios[0].each == std::vector<double>{0.5, 1.0, 0.8});
  CHECK(ratios[0].median == 0.8);
}
