// SPDX-License-Identifier: Apache-2.0
// moelora run: requests as JSON lines in, answers as JSON lines out. Input is read on a thread of its own, so that
// answers leave while a slow producer thinks; output keeps the order of the input unless told otherwise.
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>

#include "samples/cli/command.h"
#include "samples/cli/live.h"
#include "samples/cli/progress.h"
#include "samples/cli/run_request.h"

namespace moelora_cli {
namespace {

struct RunFlags {
  EngineFlags engine;
  std::string input = "-", output = "-";
  std::vector<std::string> adapters;
  size_t in_flight = 256;
  bool as_completed = false;
};

// Lines of a stream, read ahead by a thread; each one wakes the queue that the main loop waits on.
class LineReader {
 public:
  LineReader(std::istream& stream, const Queue& queue, size_t ahead) : ahead_(ahead) {
    thread_ = std::thread([this, &stream, &queue] {
      std::string line;
      while (std::getline(stream, line)) {
        std::unique_lock lock(mutex_);
        room_.wait(lock, [this] { return lines_.size() < ahead_ || stopped_; });
        if (stopped_) {
          return;
        }
        lines_.push_back(std::move(line));
        lock.unlock();
        must(moelora_queue_wake, queue.get());
      }
      const std::lock_guard lock(mutex_);
      ended_ = true;
      moelora_queue_wake(queue.get(), nullptr);
    });
  }
  ~LineReader() {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    room_.notify_all();
    thread_.join();
  }
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;

  std::optional<std::string> take() {
    const std::lock_guard lock(mutex_);
    if (lines_.empty()) {
      return std::nullopt;
    }
    std::string line = std::move(lines_.front());
    lines_.pop_front();
    room_.notify_all();
    return line;
  }
  [[nodiscard]] bool ended() const {
    const std::lock_guard lock(mutex_);
    return ended_ && lines_.empty();
  }

 private:
  const size_t ahead_;
  mutable std::mutex mutex_;
  std::condition_variable room_;
  std::deque<std::string> lines_;
  bool ended_ = false, stopped_ = false;
  std::thread thread_;
};

class Runner {
 public:
  Runner(const RunFlags& flags, const RunContext& context, std::ostream& out)
      : flags_(flags), context_(context), out_(out) {}

  void run(LineReader& reader, Progress& progress) {
    while (!reader.ended() || !running_.empty()) {
      while (running_.size() < flags_.in_flight) {
        const std::optional<std::string> line = reader.take();
        if (!line) {
          break;
        }
        if (line->find_first_not_of(" \t\r") != std::string::npos) {
          start(*line);
        }
      }
      if (reader.ended() && running_.empty()) {
        break;
      }
      for (const moelora_event& event : context_.queue->wait(100)) {
        advance(event);
      }
      progress.show(done_, failed_, tokens_);
    }
  }

  [[nodiscard]] size_t done() const { return done_; }
  [[nodiscard]] size_t failed() const { return failed_; }
  [[nodiscard]] size_t tokens() const { return tokens_; }

 private:
  struct Running {
    Json id;
    Request request;
  };

  void start(const std::string& text) {
    const size_t number = ++started_;
    Json id = number;
    try {
      const Json line = Json::parse(text);
      id = run_id(line, number);
      Request request = make_run_request(context_, line, number);
      request.submit();
      running_.emplace(number, Running{id, std::move(request)});
    } catch (const Failure& failure) {
      write(number, run_error(id, failure.status, failure.what()), true);
    } catch (const Json::exception& error) {
      write(number, run_error(id, MOELORA_E_INVALID, std::string("not JSON: ") + error.what()), true);
    }
  }

  void advance(const moelora_event& event) {
    const auto found = running_.find(event.tag);
    must_live(event);
    if (found == running_.end()) {
      return;
    }
    Running& running = found->second;
    try {
      tokens_ += running.request.read(0);
      if (!running.request.finished()) {
        return;
      }
      write(event.tag, run_answer(running.id, running.request), false);
    } catch (const Failure& failure) {
      write(event.tag, run_error(running.id, failure.status, failure.what()), true);
    }
    running_.erase(found);
  }

  void write(size_t number, const Json& answer, bool failed) {
    ++done_;
    failed_ += failed ? 1 : 0;
    waiting_.emplace(flags_.as_completed ? done_ : number,
                     answer.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
    for (auto next = waiting_.find(written_ + 1); next != waiting_.end(); next = waiting_.find(written_ + 1)) {
      out_ << next->second << '\n';
      waiting_.erase(next);
      ++written_;
    }
    out_.flush();
    if (!out_) {
      throw Failure(MOELORA_E_IO, "cannot write " + flags_.output);
    }
  }

  const RunFlags& flags_;
  const RunContext& context_;
  std::ostream& out_;
  std::unordered_map<uint64_t, Running> running_;
  std::unordered_map<size_t, std::string> waiting_;  // done, but an earlier one is not
  size_t started_ = 0, done_ = 0, failed_ = 0, written_ = 0, tokens_ = 0;
};

size_t count_lines(const std::string& path) {
  std::ifstream file(path);
  size_t count = 0;
  for (std::string line; std::getline(file, line);) {
    count += line.find_first_not_of(" \t\r") != std::string::npos ? 1 : 0;
  }
  return count;
}

int run(const RunFlags& flags) {
  std::ifstream in_file;
  std::ofstream out_file;
  if (flags.input != "-") {
    if (std::filesystem::is_directory(flags.input)) {
      throw Failure(MOELORA_E_IO, "--input " + flags.input + " is a folder");
    }
    in_file.open(flags.input);
    if (!in_file) {
      throw Failure(MOELORA_E_IO, "cannot open --input " + flags.input);
    }
  }
  const Engine engine(flags.engine);
  std::optional<LiveServer> live;
  if (flags.engine.live) {
    live.emplace(engine, "run", flags.engine.model);
  }
  const Queue queue;
  RunContext context{&engine, &queue, {}, {}, engine.has_tokenizer()};
  moelora_sampling_init(&context.defaults);
  for (const std::string& text : flags.adapters) {
    const AdapterFlag adapter = parse_adapter(text);
    context.adapters[adapter.name] = engine.load(adapter);
  }
  if (flags.output != "-") {
    out_file.open(flags.output);
    if (!out_file) {
      throw Failure(MOELORA_E_IO, "cannot write --output " + flags.output);
    }
  }
  Runner runner(flags, context, flags.output == "-" ? std::cout : out_file);
  const double start = now_ms();
  {
    Progress progress(flags.input == "-" ? 0 : count_lines(flags.input));
    LineReader reader(flags.input == "-" ? std::cin : in_file, queue, flags.in_flight);
    runner.run(reader, progress);
  }
  const double seconds = (now_ms() - start) / 1e3;
  if (!flags.engine.timeline.empty()) {
    engine.write_timeline(flags.engine.timeline);
  }
  std::fprintf(stderr, "%zu requests, %zu failed, %zu output tokens in %.2f s, %.1f tokens/s\n", runner.done(),
               runner.failed(), runner.tokens(), seconds, static_cast<double>(runner.tokens()) / seconds);
  return runner.failed() == 0 ? 0 : 1;
}

}  // namespace

void add_run(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<RunFlags>();
  CLI::App* command = app.add_subcommand("run", "Answers requests, one JSON object a line");
  add_engine_flags(*command, flags->engine, true);
  add_observe_flags(*command, flags->engine);
  command->add_option("--input", flags->input, "file of requests; -: standard input");
  command->add_option("--output", flags->output, "file of answers; -: standard output");
  command->add_option("--adapter", flags->adapters, "NAME=DIR of an adapter; may be repeated")->allow_extra_args(false);
  command->add_option("--in-flight", flags->in_flight, "most requests in the engine at once")
      ->check(CLI::Range(1, 100000));
  command->add_flag("--as-completed", flags->as_completed, "write answers as they come, not in order of input");
  command->callback([flags, exit_code] { *exit_code = run(*flags); });
}

}  // namespace moelora_cli
