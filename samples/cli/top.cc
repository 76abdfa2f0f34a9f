// SPDX-License-Identifier: Apache-2.0
// moelora top: what a running `moelora bench` or `run` is doing, as the difference of two looks at its counters. On a
// terminal the page is drawn again and again; elsewhere one page follows the other.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <thread>

#include "samples/cli/command.h"
#include "samples/cli/live.h"
#include "samples/cli/metrics_reader.h"

namespace moelora_cli {
namespace {

struct TopFlags {
  int pid = 0;
  double interval = 1;
  bool once = false;
  size_t adapters = 20;
};

struct Look {
  nlohmann::json process;
  MetricsSnapshot metrics;
};

Look look_at(int pid) {
  Look look;
  look.process = ask_live(pid);
  look.metrics = read_metrics(look.process.at("metrics").get<std::string>());
  return look;
}

template <class... Values>
std::string printed(const char* format, Values... values) {
  char text[512];
  std::snprintf(text, sizeof(text), format, values...);
  return text;
}

// Control characters of a stranger's name must not reach the terminal.
std::string shown(std::string name, size_t most) {
  for (char& c : name) {
    c = static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  }
  return name.size() <= most ? name : name.substr(0, most - 3) + "...";
}

// Values now and a second's change between two looks.
class Page {
 public:
  Page(const Look& before, const Look& now)
      : before_(before), now_(now), seconds_(std::max(second(now) - second(before), 1e-3)) {}

  [[nodiscard]] std::string text(size_t num_adapters) const {
    const auto value = [&](const char* name) { return now_.metrics.value(name); };
    const double steps = rate("steps_total");
    const double step_ms = steps > 0 ? 1e3 * rate("step_seconds_sum") / steps : 0;
    const double pages = std::max(value("pages"), 1.0);
    std::string page = printed(
        "moelora %s, pid %d, %s, %.0f s\n", now_.process.value("command", "").c_str(), now_.process.value("pid", 0),
        shown(std::filesystem::path(now_.process.value("model", "")).filename().string(), 60).c_str(), second(now_));
    page += printed("requests  %.0f running, %.0f waiting; %.1f/s finished, %.0f in all, %.0f failed\n",
                    value("requests_running"), value("requests_waiting"), rate("requests_finished_total"),
                    value("requests_finished_total"), value("requests_failed_total"));
    page += printed("tokens    %.1f/s out, %.1f/s of prompts; first after %.0f ms\n", rate("output_tokens_total"),
                    rate("prompt_tokens_total"), mean_ms("time_to_first_token_seconds"));
    page += printed("steps     %.1f/s of %.2f ms, busy %.0f %%; %.1f experts a layer; %.0f preemptions\n", steps,
                    step_ms, 100 * rate("step_seconds_sum"), value("active_experts"), value("preemptions_total"));
    page += printed(
        "adapters  %.0f registered, %.0f on the device, %.0f on their way; %.1f loads/s of %.2f MB, %.1f hits/s\n",
        value("adapters_registered"), value("adapters_resident"), value("adapters_loading"),
        rate("adapter_loads_total"), megabytes_a_load(), rate("adapter_hits_total"));
    page += printed("pages     %.0f: %.0f %% KV, %.0f %% adapters, %.0f %% free\n", value("pages"),
                    100 * value("pages_kv") / pages, 100 * value("pages_adapter") / pages,
                    100 * value("pages_free") / pages);
    return page + adapter_table(num_adapters);
  }

 private:
  static double second(const Look& look) { return look.process.value("seconds", 0.0); }
  [[nodiscard]] double rate(const char* name) const {
    return (now_.metrics.value(name) - before_.metrics.value(name)) / seconds_;
  }
  // Of a histogram, between the two looks; over all time where nothing fell between them.
  [[nodiscard]] double mean_ms(const std::string& name) const {
    const MetricsSnapshot& now = now_.metrics;
    double sum = now.value(name + "_sum") - before_.metrics.value(name + "_sum");
    double count = now.value(name + "_count") - before_.metrics.value(name + "_count");
    if (count <= 0) {
      sum = now.value(name + "_sum");
      count = std::max(now.value(name + "_count"), 1.0);
    }
    return 1e3 * sum / count;
  }
  [[nodiscard]] double megabytes_a_load() const {
    return now_.metrics.value("adapter_load_bytes_total") / std::max(now_.metrics.value("adapter_loads_total"), 1.0) /
           1e6;
  }

  struct Row {
    const AdapterSamples* samples;
    double tokens_per_s;
  };
  static double value_of(const AdapterSamples& samples, const char* name) {
    const auto found = samples.values.find(name);
    return found == samples.values.end() ? 0 : found->second;
  }

  // The busiest first.
  [[nodiscard]] std::string adapter_table(size_t num_adapters) const {
    std::vector<Row> rows;
    for (const auto& [id, samples] : now_.metrics.adapters) {
      const auto old = before_.metrics.adapters.find(id);
      const double was = old == before_.metrics.adapters.end() ? 0 : value_of(old->second, "output_tokens_total");
      rows.push_back({&samples, (value_of(samples, "output_tokens_total") - was) / seconds_});
    }
    std::stable_sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) {
      return a.tokens_per_s != b.tokens_per_s
                 ? a.tokens_per_s > b.tokens_per_s
                 : value_of(*a.samples, "requests_total") > value_of(*b.samples, "requests_total");
    });
    if (rows.empty() || num_adapters == 0) {
      return "";
    }
    std::string table = printed("%-28s %9s %8s %8s %9s %9s %6s %6s %7s\n", "adapter", "requests", "running", "waiting",
                                "tokens", "tokens/s", "loads", "hits", "device");
    for (size_t i = 0; i < std::min(rows.size(), num_adapters); ++i) {
      const AdapterSamples& samples = *rows[i].samples;
      const auto value = [&](const char* name) { return value_of(samples, name); };
      table += printed("%-28s %9.0f %8.0f %8.0f %9.0f %9.1f %6.0f %6.0f %7s\n", shown(samples.name, 28).c_str(),
                       value("requests_total"), value("requests_running"), value("requests_waiting"),
                       value("output_tokens_total"), rows[i].tokens_per_s, value("device_loads_total"),
                       value("device_hits_total"), value("resident") > 0 ? "yes" : "no");
    }
    return table;
  }

  const Look& before_;
  const Look& now_;
  double seconds_;
};

int choose_process() {
  const std::vector<int> found = live_processes();
  if (found.empty()) {
    throw Failure(MOELORA_E_NOT_FOUND,
                  "no running moelora bench or run of this user (looked in " + live_folder() + ")");
  }
  if (found.size() > 1) {
    std::string list;
    for (const int pid : found) {
      list += " " + std::to_string(pid);
    }
    throw Failure(MOELORA_E_INVALID, "several are running; choose one with --pid:" + list);
  }
  return found.front();
}

int top(const TopFlags& flags) {
  const int pid = flags.pid > 0 ? flags.pid : choose_process();
  const bool terminal = isatty(STDOUT_FILENO) == 1;
  const auto pause = std::chrono::duration<double>(flags.interval);
  Look before = look_at(pid);
  for (bool first = true;; first = false) {
    std::this_thread::sleep_for(pause);
    Look now;
    try {
      now = look_at(pid);
    } catch (const Failure&) {
      if (first) {
        throw;
      }
      std::printf("process %d has ended\n", pid);
      return 0;
    }
    const std::string page = Page(before, now).text(flags.adapters);
    const char* clear = terminal && !flags.once ? "\033[H\033[J" : first ? "" : "\n";
    std::printf("%s%s", clear, page.c_str());
    std::fflush(stdout);
    if (flags.once || std::ferror(stdout) != 0) {
      return 0;
    }
    before = std::move(now);
  }
}

}  // namespace

void add_top(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<TopFlags>();
  CLI::App* command = app.add_subcommand("top", "Shows what a running moelora bench or run of this user is doing");
  command->add_option("--pid", flags->pid, "of the process; not needed where there is one")->check(CLI::PositiveNumber);
  command->add_option("--interval", flags->interval, "seconds between two looks")->check(CLI::Range(0.05, 3600.0));
  command->add_option("--adapters", flags->adapters, "lines of adapters, the busiest first");
  command->add_flag("--once", flags->once, "one page, then end");
  command->callback([flags, exit_code] { *exit_code = top(*flags); });
}

}  // namespace moelora_cli
