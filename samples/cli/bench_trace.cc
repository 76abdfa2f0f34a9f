// SPDX-License-Identifier: Apache-2.0
// See bench_trace.h. Times count from when a request was due, not from when this program got to submit it.
#include "samples/cli/bench_trace.h"

#include <moelora_experimental.h>
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <future>
#include <optional>
#include <random>
#include <thread>
#include <unordered_map>

#include "samples/cli/bench_trace_report.h"
#include "samples/cli/live.h"
#include "samples/cli/progress.h"
#include "samples/cli/random_request.h"

namespace moelora_cli {
namespace {

constexpr int32_t kWarmUpRequests = 16, kWarmUpTokens = 4;
constexpr int32_t kInFlightQueued = 1024;  // the engine's own limit, where the trace needs no more

moelora_stats engine_stats(const Engine& engine) {
  moelora_stats stats;
  moelora_stats_init(&stats);
  must(moelora_stats_get, engine.get(), &stats);
  return stats;
}

// Of all threads of this process, until now.
double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

class TraceClient {
 public:
  TraceClient(const TraceFlags& flags, const Engine& engine, int64_t num_adapters)
      : flags_(flags), engine_(engine), info_(engine.info()), random_(flags.workload.seed) {
    SloraWorkload workload = flags.workload;
    workload.num_adapters = num_adapters;
    trace_ = slora_trace(workload);
    run_.adapters = num_adapters;
    run_.adapters_touched = count_adapters(trace_);
    run_.times.resize(trace_.size());
  }

  void load_adapters() {
    const double start = now_ms();
    adapters_.resize(static_cast<size_t>(run_.adapters));
    const size_t workers = std::min<size_t>(adapters_.size(), std::max(std::thread::hardware_concurrency(), 1u));
    std::vector<std::future<void>> running;
    for (size_t worker = 0; worker < workers; ++worker) {
      running.push_back(std::async(std::launch::async, [this, worker, workers] {
        for (size_t i = worker; i < adapters_.size(); i += workers) {
          load_adapter(i);
        }
      }));
    }
    for (std::future<void>& worker : running) {
      worker.get();
    }
    run_.load_seconds = (now_ms() - start) / 1e3;
  }

  // On the base model: adapters are met cold.
  void warm_up() {
    for (int32_t i = 0; i < kWarmUpRequests; ++i) {
      Request request = make_request(-1, static_cast<int32_t>(flags_.workload.input_low), kWarmUpTokens);
      request.submit();
      request.read_to_end();
    }
  }

  TraceRun run(Progress& progress) {
    const moelora_stats before = engine_stats(engine_);
    const double cpu_before = cpu_seconds();
    start_ms_ = now_ms();
    while (finished_ < trace_.size()) {
      submit_due();
      for (const moelora_event& event : queue_.wait(wait_ms())) {
        advance(event);
      }
      progress.show(finished_, failed_, static_cast<size_t>(run_.output_tokens));
    }
    run_.cpu_seconds = cpu_seconds() - cpu_before;
    sum_up_steps(before);
    return std::move(run_);
  }

 private:
  struct Stream {
    Request request;
    size_t index = 0;
  };

  void load_adapter(size_t index) {
    const std::string name = "trace-" + std::to_string(index);
    if (!flags_.adapter_dir.empty()) {
      adapters_[index] = engine_.load({name, flags_.adapter_dir + "/" + std::to_string(index)},
                                      flags_.lazy ? uint32_t{MOELORA_ADAPTER_LAZY} : 0u);
      return;
    }
    must(moelora_adapter_load_random, engine_.get(), name.data(), name.size(), flags_.rank, flags_.targets, index + 1,
         &adapters_[index]);
  }

  [[nodiscard]] double clock() const { return (now_ms() - start_ms_) / 1e3; }

  Request make_request(int64_t adapter, int32_t input, int32_t output) {
    return random_request(engine_.get(), info_.vocab_size, random_, input, output,
                          adapter < 0 ? 0 : adapters_[static_cast<size_t>(adapter)]);
  }

  void submit_due() {
    for (; submitted_ < trace_.size() && trace_[submitted_].arrival <= clock(); ++submitted_) {
      const TraceRequest& due = trace_[submitted_];
      run_.times[submitted_].arrival = due.arrival;
      try {
        Request request = make_request(due.adapter, due.input, due.output);
        request.set_queue(queue_, submitted_);
        request.submit();
        streams_.emplace(submitted_, Stream{std::move(request), submitted_});
      } catch (const Failure& failure) {
        note_failure(failure.what());
      }
    }
  }

  [[nodiscard]] int32_t wait_ms() const {
    if (submitted_ == trace_.size()) {
      return 200;
    }
    return static_cast<int32_t>(std::clamp(std::ceil((trace_[submitted_].arrival - clock()) * 1e3), 0.0, 200.0));
  }

  void note_failure(const std::string& message) {
    ++failed_;
    ++finished_;
    if (run_.first_error.empty()) {
      run_.first_error = message;
    }
  }

  void advance(const moelora_event& event) {
    must_live(event);
    const auto found = streams_.find(event.tag);
    if (found == streams_.end()) {
      return;
    }
    Stream& stream = found->second;
    TraceTimes& times = run_.times[stream.index];
    try {
      const size_t count = stream.request.read(0);
      if (count > 0 && times.first < 0) {
        times.first = clock();
      }
      run_.output_tokens += static_cast<int64_t>(count);
      if (!stream.request.finished()) {
        return;
      }
      times.end = run_.seconds = clock();
      ++finished_;
    } catch (const Failure& failure) {
      times.first = -1;
      note_failure(failure.what());
    }
    streams_.erase(found);
  }

  void sum_up_steps(const moelora_stats& before) {
    const moelora_stats after = engine_stats(engine_);
    run_.steps = after.steps - before.steps;
    run_.adapter_loads = after.adapter_loads - before.adapter_loads;
    run_.adapter_hits = after.adapter_hits - before.adapter_hits;
    run_.adapter_evictions = after.adapter_evictions - before.adapter_evictions;
    run_.preemptions = after.preemptions - before.preemptions;
    std::vector<moelora_step_record> records(std::min<uint64_t>(run_.steps, 65536));
    size_t count = 0;
    must(moelora_step_records, engine_.get(), records.data(), records.size(), &count);
    for (size_t i = 0; i < count; ++i) {
      run_.mean_step_ms += records[i].ms / static_cast<double>(count);
      run_.mean_rows += records[i].rows / static_cast<double>(count);
      run_.mean_step_adapters += records[i].adapters / static_cast<double>(count);
    }
  }

  const TraceFlags& flags_;
  const Engine& engine_;
  moelora_engine_info info_;
  std::mt19937_64 random_;
  Queue queue_;
  std::vector<TraceRequest> trace_;
  std::vector<moelora_adapter> adapters_;
  std::unordered_map<uint64_t, Stream> streams_;
  TraceRun run_;
  double start_ms_ = 0;
  size_t submitted_ = 0, finished_ = 0, failed_ = 0;
};

void check_trace(const TraceFlags& flags, const moelora_engine_info& info) {
  const SloraWorkload& workload = flags.workload;
  if (workload.input_end - 1 + workload.output_end - 1 > info.max_context_tokens) {
    throw Failure(MOELORA_E_CONTEXT_LENGTH, "--input-range and --output-range exceed the context of " +
                                                std::to_string(info.max_context_tokens) + " tokens");
  }
}

TraceRun run_once(const TraceFlags& flags, const EngineFlags& engine_flags, int64_t adapters, Progress& progress) {
  const Engine engine(engine_flags);
  check_trace(flags, engine.info());
  std::optional<LiveServer> live;
  if (engine_flags.live) {
    live.emplace(engine, "bench --trace " + flags.name, engine_flags.model);
  }
  TraceClient client(flags, engine, adapters);
  client.load_adapters();
  client.warm_up();
  TraceRun run = client.run(progress);
  if (!engine_flags.timeline.empty()) {
    engine.write_timeline(engine_flags.timeline);
  }
  return run;
}

// With more than one run each has a file of its own: out.json becomes out-2000-0.json.
std::string timeline_of(const std::string& path, const TraceFlags& flags, int64_t adapters, int64_t repeat) {
  if (path.empty() || (flags.adapters.size() == 1 && flags.repeat == 1)) {
    return path;
  }
  const std::filesystem::path whole(path);
  const std::string name = whole.stem().string() + "-" + std::to_string(adapters) + "-" + std::to_string(repeat);
  return (whole.parent_path() / (name + whole.extension().string())).string();
}

void set_range(const std::vector<int64_t>& range, const char* option, int64_t& low, int64_t& end) {
  if (range[1] <= range[0]) {
    throw Failure(MOELORA_E_INVALID, std::string(option) + " is LOW,END with END above LOW");
  }
  low = range[0];
  end = range[1];
}

}  // namespace

void add_trace_options(CLI::App& command, TraceFlags& flags) {
  command.add_option("--trace", flags.name, "S-LoRA's synthetic workload: arrivals at their times, open loop")
      ->check(CLI::IsMember({"slora"}));
  command.add_option("--duration", flags.workload.duration, "of the trace, seconds: rate times duration requests")
      ->check(CLI::PositiveNumber);
  command.add_option("--cv", flags.workload.cv, "coefficient of variation of the trace's gaps; 1 = Poisson")
      ->check(CLI::Range(0.01, 100.0));
  command.add_option("--alpha", flags.workload.alpha, "of the trace's adapters: 1 = uniform, smaller is more skewed")
      ->check(CLI::Range(0.01, 100.0));
  command.add_option("--input-range", flags.input_range, "LOW,END: the trace's prompts have LOW to END - 1 tokens")
      ->delimiter(',')
      ->expected(2)
      ->check(CLI::PositiveNumber);
  command.add_option("--output-range", flags.output_range, "LOW,END: the trace's answers have LOW to END - 1 tokens")
      ->delimiter(',')
      ->expected(2)
      ->check(CLI::PositiveNumber);
  command.add_option("--adapter-dir", flags.adapter_dir, "the trace's adapters are its folders 0, 1, ...");
  command.add_flag("--lazy", flags.lazy, "folders are registered by their headers and read when they are wanted");
  command.add_option("--repeat", flags.repeat, "runs of each number of adapters, by turns")->check(CLI::Range(1, 1000));
  command.add_option("--slo", flags.slo_seconds, "seconds in which a first token is wanted")
      ->check(CLI::PositiveNumber);
  command.add_option("--strip", flags.strip_seconds,
                     "seconds left out at each end by the stripped throughput; initially duration / 12");
}

int bench_trace(const CLI::App& command, TraceFlags flags, EngineFlags engine) {
  for (const char* closed_loop : {"--concurrency", "--input", "--output", "--requests", "--routing"}) {
    if (command.count(closed_loop) > 0) {
      throw Failure(MOELORA_E_INVALID, std::string(closed_loop) + " is not for --trace");
    }
  }
  set_range(flags.input_range, "--input-range", flags.workload.input_low, flags.workload.input_end);
  set_range(flags.output_range, "--output-range", flags.workload.output_low, flags.workload.output_end);
  const auto num_requests = static_cast<int64_t>(flags.workload.rate * flags.workload.duration);
  const int64_t most = *std::max_element(flags.adapters.begin(), flags.adapters.end());
  if (num_requests < 1) {
    throw Failure(MOELORA_E_INVALID, "--rate times --duration is less than one request");
  }
  if (!flags.adapter_dir.empty() && most > 0) {
    const std::string last = flags.adapter_dir + "/" + std::to_string(most - 1);
    if (!std::filesystem::is_directory(last)) {
      throw Failure(MOELORA_E_NOT_FOUND, "--adapter-dir: no folder " + last + " (tools/make_adapters.py makes them)");
    }
  }
  if (num_requests > kInFlightQueued) {  // nobody is refused, unless the user's own settings say so
    engine.settings.insert(engine.settings.begin(), "max_queued_requests=" + std::to_string(num_requests));
  }
  std::vector<TraceRun> runs;
  for (int64_t repeat = 0; repeat < flags.repeat; ++repeat) {
    for (size_t i = 0; i < flags.adapters.size(); ++i) {
      Progress progress(static_cast<size_t>(num_requests));
      // Who goes first changes from repeat to repeat.
      const size_t turn = (i + static_cast<size_t>(repeat)) % flags.adapters.size();
      EngineFlags own = engine;
      own.timeline = timeline_of(engine.timeline, flags, flags.adapters[turn], repeat);
      runs.push_back(run_once(flags, own, flags.adapters[turn], progress));
      runs.back().repeat = repeat;
    }
  }
  if (!flags.json) {
    std::printf("%s", trace_table(flags, runs).c_str());
  }
  std::printf("%s\n", trace_json(flags, runs).c_str());
  const bool failed =
      std::any_of(runs.begin(), runs.end(), [](const TraceRun& run) { return !run.first_error.empty(); });
  return failed ? 1 : 0;
}

}  // namespace moelora_cli
