// SPDX-License-Identifier: Apache-2.0
// moelora bench: random prompts in a closed loop of --concurrency streams (or Poisson arrivals with --rate), request i
// with adapter i mod N. The bandwidth ceiling is measured in this process on the weights themselves, interleaved with
// the run; its time is taken out of all others. With --trace the requests are those of bench_trace.h instead.
#include <cmath>
#include <cstdio>
#include <deque>
#include <future>
#include <optional>
#include <random>
#include <thread>
#include <unordered_map>

#include "samples/cli/bench_report.h"
#include "samples/cli/bench_trace.h"
#include "samples/cli/command.h"
#include "samples/cli/live.h"
#include "samples/cli/progress.h"
#include "samples/cli/random_request.h"

namespace moelora_cli {
namespace {

constexpr int32_t kWarmUpTokens = 4;  // after them weights, caches and adapters are where they will be
constexpr double kTakeStepsMs = 50;   // the engine keeps the last records only

struct BenchFlags {
  EngineFlags engine;
  int64_t concurrency = 1, adapters = 0, input = 128, output = 64, requests = 0;
  int32_t rank = 16;
  std::string targets = "all", routing = "random";
  double rate = 0, zipf_exponent = 1.0;
  uint64_t seed = 1;
  int64_t pairs = 11;
  bool json = false;
  bool no_warm_up = false;
  std::vector<int64_t> adapter_counts = {0};
  TraceFlags trace;
};

uint32_t target_bits(const std::string& targets) {
  return targets == "all"         ? MOELORA_RANDOM_ATTENTION | MOELORA_RANDOM_EXPERTS
         : targets == "attention" ? MOELORA_RANDOM_ATTENTION
                                  : MOELORA_RANDOM_EXPERTS;
}

std::string routing_text(const BenchFlags& flags) {
  if (flags.routing != "zipf") {
    return flags.routing;
  }
  char text[32];
  std::snprintf(text, sizeof(text), "zipf(%.3g)", flags.zipf_exponent);
  return text;
}

ConfigPtr bench_config(const BenchFlags& flags) {
  EngineFlags engine = flags.engine;
  // Named defaults of the bench come before --set, so that the user's own settings win.
  std::vector<std::string> settings;
  if (flags.concurrency > 64) {
    settings.push_back("max_num_sequences=" + std::to_string(flags.concurrency));
  }
  if (flags.adapters > 64) {
    settings.push_back("max_adapters_resident=" + std::to_string(flags.adapters));
  }
  if (flags.routing != "random") {
    settings.push_back("random_routing=" + flags.routing);
    settings.push_back("random_routing_exponent=" + std::to_string(flags.zipf_exponent));
  }
  engine.settings.insert(engine.settings.begin(), settings.begin(), settings.end());
  return make_config(engine);
}

class Bench {
 public:
  Bench(const BenchFlags& flags, const Engine& engine)
      : flags_(flags), engine_(engine), info_(engine.info()), random_(flags.seed) {
    measured_.concurrency = flags.concurrency;
    measured_.adapters = flags.adapters;
    measured_.requests = flags.requests;
    measured_.routing = routing_text(flags);
    load_adapters();
  }

  void warm_up() {
    std::vector<Request> requests;
    for (int64_t i = 0; i < std::max(flags_.concurrency, std::min<int64_t>(flags_.adapters, flags_.requests)); ++i) {
      requests.push_back(make_request(i, kWarmUpTokens));
      requests.back().submit();
    }
    for (Request& request : requests) {
      request.read_to_end();
    }
    take_steps();
    measured_.steps.clear();
  }

  const BenchMeasurements& run() {
    Progress progress(static_cast<size_t>(flags_.requests));
    const double start = clock();
    next_arrival_ = start;
    while (finished_ < flags_.requests) {
      submit_due();
      for (const moelora_event& event : queue_.wait(wait_ms())) {
        advance(event);
      }
      if (produced_ >= next_ceiling_at()) {
        measure_ceiling();
      }
      if (now_ms() - steps_taken_ms_ > kTakeStepsMs) {
        take_steps();
      }
      progress.show(static_cast<size_t>(finished_), 0, static_cast<size_t>(produced_));
    }
    measured_.seconds = (clock() - start) / 1e3;
    measured_.output_tokens = produced_;
    measured_.loads = mean_loads();
    take_steps();
    for (const moelora_step_record& step : measured_.steps) {
      double bytes = 0;
      must(moelora_weight_bytes, engine_.get(), step.active_experts, &bytes);
      measured_.step_weight_bytes.push_back(bytes);
    }
    return measured_;
  }

 private:
  // Side by side: drawing one of gpt-oss-20b's shape at rank 32 takes a core more than a second.
  void load_adapters() {
    adapters_.resize(static_cast<size_t>(flags_.adapters));
    const size_t workers = std::min<size_t>(adapters_.size(), std::max(std::thread::hardware_concurrency(), 1u));
    std::vector<std::future<void>> running;
    for (size_t worker = 0; worker < workers; ++worker) {
      running.push_back(std::async(std::launch::async, [this, worker, workers] {
        for (size_t i = worker; i < adapters_.size(); i += workers) {
          const std::string name = "bench-" + std::to_string(i);
          must(moelora_adapter_load_random, engine_.get(), name.data(), name.size(), flags_.rank,
               target_bits(flags_.targets), flags_.seed + i + 1, &adapters_[i]);
        }
      }));
    }
    for (std::future<void>& worker : running) {
      worker.get();
    }
  }

  [[nodiscard]] AdapterLoads mean_loads() const {
    AdapterLoads loads;
    double uploads = 0;
    for (const moelora_adapter adapter : adapters_) {
      moelora_adapter_info info;
      moelora_adapter_info_init(&info);
      must(moelora_adapter_info_get, engine_.get(), adapter, &info);
      loads.read_ms += info.read_ms / static_cast<double>(adapters_.size());
      loads.pack_ms += info.pack_ms / static_cast<double>(adapters_.size());
      loads.bytes += static_cast<double>(info.host_bytes) / static_cast<double>(adapters_.size());
      loads.upload_ms += info.upload_ms;
      uploads += info.upload_ms > 0 ? 1 : 0;
    }
    loads.upload_ms /= std::max(uploads, 1.0);
    return loads;
  }

  struct Stream {
    Request request;
    double submitted = 0, last_token = 0;
  };

  // Time without the ceilings.
  [[nodiscard]] double clock() const { return now_ms() - paused_ms_; }

  Request make_request(int64_t index, int32_t max_tokens) {
    const moelora_adapter adapter = adapters_.empty() ? 0 : adapters_[static_cast<size_t>(index) % adapters_.size()];
    return random_request(engine_.get(), info_.vocab_size, random_, static_cast<int32_t>(flags_.input), max_tokens,
                          adapter);
  }

  void submit_due() {
    const auto may_submit = [this] {
      if (submitted_ == flags_.requests) {
        return false;
      }
      return flags_.rate > 0 ? clock() >= next_arrival_ : submitted_ - finished_ < flags_.concurrency;
    };
    while (may_submit()) {
      Request request = make_request(submitted_, static_cast<int32_t>(flags_.output));
      request.set_queue(queue_, static_cast<uint64_t>(submitted_));
      const double now = clock();
      request.submit();
      streams_.emplace(static_cast<uint64_t>(submitted_), Stream{std::move(request), now, 0});
      ++submitted_;
      measured_.input_tokens += flags_.input;
      if (flags_.rate > 0) {
        next_arrival_ += std::exponential_distribution<double>(flags_.rate)(random_) * 1e3;
      }
    }
  }

  [[nodiscard]] int32_t wait_ms() const {
    const bool arrival = flags_.rate > 0 && submitted_ < flags_.requests;
    return arrival ? static_cast<int32_t>(std::clamp(std::ceil(next_arrival_ - clock()), 0.0, 200.0)) : 200;
  }

  void advance(const moelora_event& event) {
    must_live(event);
    const auto found = streams_.find(event.tag);
    if (found == streams_.end()) {
      return;
    }
    Stream& stream = found->second;
    const size_t count = stream.request.read(0);
    const double now = clock();
    for (size_t i = 0; i < count; ++i) {
      if (stream.last_token == 0) {
        measured_.ttft_ms.push_back(now - stream.submitted);
      } else {  // tokens that arrive together share the time since the one before
        measured_.inter_token_ms.push_back((now - stream.last_token) / static_cast<double>(count));
      }
      if (i + 1 == count || stream.last_token == 0) {
        stream.last_token = now;
      }
    }
    produced_ += static_cast<int64_t>(count);
    if (stream.request.finished()) {
      ++finished_;
      streams_.erase(found);
    }
  }

  // Ceilings are spread evenly over the tokens to come, none at the very start and end.
  [[nodiscard]] int64_t next_ceiling_at() const {
    const auto taken = static_cast<int64_t>(measured_.ceilings.size());
    return taken == flags_.pairs ? INT64_MAX : (taken + 1) * flags_.requests * flags_.output / (flags_.pairs + 1);
  }

  void measure_ceiling() {
    const double begin = now_ms();
    Ceiling ceiling;
    must(moelora_measure_read_bandwidth, engine_.get(), &ceiling.bytes_per_second);
    const double end = now_ms();
    ceiling.at_ms = begin;
    measured_.ceilings.push_back(ceiling);
    // The step that was running when the measurement was asked for is the engine's own time, not the ceiling's.
    double step_left = 0;
    const size_t known = measured_.steps.size();
    take_steps();
    for (size_t i = known; i < measured_.steps.size(); ++i) {
      const moelora_step_record& step = measured_.steps[i];
      if (step.start_ms < begin && step.start_ms + step.ms > begin) {
        step_left = std::min(step.start_ms + step.ms, end) - begin;
      }
    }
    paused_ms_ += end - begin - step_left;
  }

  void take_steps() {
    steps_taken_ms_ = now_ms();
    records_.resize(4096);
    size_t count = 0;
    must(moelora_step_records, engine_.get(), records_.data(), records_.size(), &count);
    size_t first = count;
    while (first > 0 && records_[first - 1].start_ms > last_step_ms_) {
      --first;
    }
    for (size_t i = first; i < count; ++i) {
      measured_.steps.push_back(records_[i]);
      last_step_ms_ = records_[i].start_ms;
    }
  }

  const BenchFlags& flags_;
  const Engine& engine_;
  moelora_engine_info info_;
  std::mt19937_64 random_;
  Queue queue_;
  std::vector<moelora_adapter> adapters_;
  std::unordered_map<uint64_t, Stream> streams_;
  std::vector<moelora_step_record> records_;
  BenchMeasurements measured_;
  int64_t submitted_ = 0, finished_ = 0, produced_ = 0;
  double next_arrival_ = 0, paused_ms_ = 0, last_step_ms_ = -1, steps_taken_ms_ = 0;
};

int bench(const CLI::App& command, BenchFlags& flags) {
  if (!flags.trace.name.empty()) {
    TraceFlags& trace = flags.trace;
    trace.adapters = flags.adapter_counts;
    trace.rank = flags.rank;
    trace.targets = target_bits(flags.targets);
    trace.json = flags.json;
    trace.workload.rate = flags.rate > 0 ? flags.rate : trace.workload.rate;
    trace.workload.seed = command.count("--seed") > 0 ? static_cast<uint32_t>(flags.seed) : trace.workload.seed;
    return bench_trace(command, trace, flags.engine);
  }
  if (flags.adapter_counts.size() > 1) {
    throw Failure(MOELORA_E_INVALID, "--adapters takes several numbers with --trace only");
  }
  flags.adapters = flags.adapter_counts.front();
  if (flags.routing != "random" && !flags.engine.random_weights) {
    throw Failure(MOELORA_E_INVALID, "--routing " + flags.routing + " needs --random-weights");
  }
  if (flags.requests == 0) {
    flags.requests = flags.concurrency;
  }
  const ConfigPtr config = bench_config(flags);
  const Engine engine(config.get(), flags.engine.model);
  std::optional<LiveServer> live;
  if (flags.engine.live) {
    live.emplace(engine, "bench", flags.engine.model);
  }
  const moelora_engine_info info = engine.info();
  if (flags.input + flags.output > info.max_context_tokens) {
    throw Failure(MOELORA_E_CONTEXT_LENGTH,
                  "--input and --output exceed the context of " + std::to_string(info.max_context_tokens) + " tokens");
  }
  Bench run(flags, engine);
  if (!flags.no_warm_up) {
    run.warm_up();
  }
  const BenchMeasurements& measured = run.run();
  const BenchReport report = sum_up(measured);
  if (!flags.engine.timeline.empty()) {
    engine.write_timeline(flags.engine.timeline);
  }
  if (!flags.json) {
    std::printf("%s, %s weights, %d layers, %s with %d threads; %lld in, %lld out, rank %d on %s; routing %s\n",
                info.architecture, info.dtype, info.num_layers, info.device_name, info.num_threads,
                static_cast<long long>(flags.input), static_cast<long long>(flags.output), flags.rank,
                flags.targets.c_str(), routing_text(flags).c_str());
    std::printf("%s", report_table(measured, report).c_str());
  }
  std::printf("%s\n", report_json(measured, report).c_str());
  return 0;
}

}  // namespace

void add_bench(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<BenchFlags>();
  CLI::App* command = app.add_subcommand("bench", "Measures decode and prefill against the machine's read bandwidth");
  add_engine_flags(*command, flags->engine, true);
  add_observe_flags(*command, flags->engine);
  command->add_flag("--random-weights", flags->engine.random_weights, "config.json is enough");
  command->add_option("--concurrency", flags->concurrency, "streams at once")->check(CLI::PositiveNumber);
  command
      ->add_option("--adapters", flags->adapter_counts,
                   "random adapters; request i uses i mod N. With --trace several numbers, each measured: 0,5,2000")
      ->delimiter(',')
      ->check(CLI::NonNegativeNumber);
  command->add_option("--rank", flags->rank, "of the adapters")->check(CLI::PositiveNumber);
  command->add_option("--targets", flags->targets)->check(CLI::IsMember({"all", "attention", "experts"}));
  command->add_option("--input", flags->input, "tokens of a prompt")->check(CLI::PositiveNumber);
  command->add_option("--output", flags->output, "tokens of an answer")->check(CLI::PositiveNumber);
  command->add_option("--requests", flags->requests, "in all; 0: one a stream")->check(CLI::NonNegativeNumber);
  command->add_option("--rate", flags->rate, "arrivals a second instead of a closed loop")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--seed", flags->seed, "of prompts, arrivals and adapters");
  command
      ->add_option("--routing", flags->routing,
                   "of random weights: random (as they come, close to uniform), zipf, or one (all rows to one set)")
      ->check(CLI::IsMember({"random", "zipf", "one"}));
  command->add_option("--zipf-exponent", flags->zipf_exponent, "of --routing zipf")->check(CLI::Range(0.0, 8.0));
  command->add_option("--ceilings", flags->pairs, "measurements of the read bandwidth")->check(CLI::Range(1, 1000));
  command->add_flag("--no-warm-up", flags->no_warm_up);
  command->add_flag("--json", flags->json, "only the JSON line");
  add_trace_options(*command, flags->trace);
  command->callback([flags, command, exit_code] { *exit_code = bench(*command, *flags); });
}

}  // namespace moelora_cli
