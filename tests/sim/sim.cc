// SPDX-License-Identifier: Apache-2.0
// sim: simulated requests, adapters and sessions against the real engine, see README.md.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include <fmt/format.h>

#include "tests/sim/workload.h"

namespace moelora::sim {
namespace {

struct Options {
  std::string shape = "small";
  int64_t pages = 0, slots = 0;
  uint64_t seed = 1;
  uint64_t seeds = 1;
  int64_t events = 100000;
  int64_t audit_every = 1;
  std::string record, replay;
};

constexpr const char* kUsage =
    "sim [--shape NAME|all] [--seed S] [--seeds N] [--events N] [--pages P] [--slots N] [--audit-every STEPS]\n"
    "    [--record FILE] [--replay FILE]\n"
    "Simulated requests, adapters and sessions against the real engine; after every step (or each STEPS-th) all "
    "audits.\n"
    "On a fault prints the seed and the number of the event, and exits 1. --replay does the events of a trace that\n"
    "--record wrote, with the same shape and pages. Shapes:";

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string key = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : nullptr;
    const auto number = [&] { return std::strtoll(value, nullptr, 10); };
    if (value == nullptr) {
      std::puts(kUsage);
      for (const Shape& shape : shapes()) {
        std::printf("  %s\n", shape.name.c_str());
      }
      std::exit(key == "--help" || key == "-h" ? 0 : 2);
    } else if (key == "--shape") {
      options.shape = value;
    } else if (key == "--seed") {
      options.seed = static_cast<uint64_t>(number());
    } else if (key == "--seeds") {
      options.seeds = static_cast<uint64_t>(number());
    } else if (key == "--events") {
      options.events = number();
    } else if (key == "--pages") {
      options.pages = number();
    } else if (key == "--slots") {
      options.slots = number();
    } else if (key == "--audit-every") {
      options.audit_every = std::max<int64_t>(1, number());
    } else if (key == "--record") {
      options.record = value;
    } else if (key == "--replay") {
      options.replay = value;
    } else {
      std::fprintf(stderr, "sim: unknown option %s\n%s\n", key.c_str(), kUsage);
      std::exit(2);
    }
  }
  return options;
}

// A folder with the config of the model, gone with this object.
class ModelDir {
 public:
  explicit ModelDir(const Shape& shape) {
    std::string name = (std::filesystem::temp_directory_path() / "moelora_sim.XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) {
      throw std::runtime_error("cannot make " + name);
    }
    path_ = name;
    const bool is_wide = shape.layers > 1;
    std::ofstream(path_ + "/config.json")
        << R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_act":"silu","dtype":"float32",)"
        << R"("hidden_size":16,"intermediate_size":16,"max_position_embeddings":65536,"rms_norm_eps":1e-6,)"
        << R"("rope_theta":10000.0,"tie_word_embeddings":false,"bos_token_id":0,"eos_token_id":)" << kEosToken
        << ",\"vocab_size\":" << kVocabSize << ",\"num_hidden_layers\":" << shape.layers
        << ",\"head_dim\":" << (is_wide ? 64 : 16) << ",\"num_attention_heads\":" << (is_wide ? 8 : 1)
        << ",\"num_key_value_heads\":" << (is_wide ? 8 : 1) << "}\n";
  }
  ~ModelDir() { std::filesystem::remove_all(path_); }
  ModelDir(const ModelDir&) = delete;
  ModelDir& operator=(const ModelDir&) = delete;
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

void print(const Shape& shape, uint64_t seed, const SimTotals& totals, double seconds) {
  fmt::print("{:8} seed {}, {} pages: {} events ({:.0f}/s), {} steps, {} rows, {} requests, {} refused, {} tokens\n",
             shape.name, seed, shape.num_pages, totals.events, static_cast<double>(totals.events) / seconds,
             totals.steps, totals.rows, totals.requests, totals.refused, totals.tokens);
  fmt::print("  ends: stop {}, length {}, cancelled {}, deadline {}, error {}; settled {}\n", totals.ends[1],
             totals.ends[2], totals.ends[3], totals.ends[4], totals.ends[5], totals.settled);
  fmt::print("  adapters: {} loads ({} fail), {} evictions, {} hits; {} read from disk, {} host copies evicted\n",
             totals.loads, totals.loads_failed, totals.evictions, totals.hits, totals.disk_loads,
             totals.host_evictions);
  fmt::print(
      "  {} preemptions, {} of them to the host; {} sessions evicted; {} tokens found cached, {} blocks evicted\n",
      totals.preemptions, totals.swaps, totals.sessions_evicted, totals.prefix_hit_tokens, totals.prefix_evictions);
  fmt::print("  longest wait: {} idle steps, {} without a token\n", totals.idle_steps_max,
             totals.steps_without_token_max);
  std::fflush(stdout);
}

// What is being done, for whoever has to say where it ended.
struct Place {
  const Options* options = nullptr;
  Shape shape;
  uint64_t seed = 0;
  int64_t number = 0;  // of the event
  Event event;
};
Place place;

void print_fault(const char* what) {
  fmt::print("FAULT at event {}: {}\n  {}\n  again: sim --shape {} --pages {} --slots {} --audit-every {} ",
             place.number, to_json(place.event), what, place.shape.name, place.shape.num_pages, place.shape.slots,
             place.options->audit_every);
  if (place.options->replay.empty()) {
    fmt::print("--seed {} --events {}\n", place.seed, std::min(place.number + 1, place.options->events));
  } else {
    fmt::print("--replay {}\n", place.options->replay);
  }
  std::fflush(stdout);
}

// A broken invariant in a destructor, a crash, or nobody's patience.
void die(int signal) {
  std::signal(signal, SIG_DFL);
  print_fault(strsignal(signal));
  std::raise(signal);
}

// False after a fault, which was printed.
bool run(const Options& options, Shape shape, uint64_t seed) {
  shape.num_pages = options.pages > 0 ? options.pages : shape.num_pages;
  shape.slots = options.slots > 0 ? options.slots : shape.slots;
  place = {&options, shape, seed, 0, {}};
  const ModelDir dir(shape);
  std::ofstream record(options.record);
  std::ifstream replay(options.replay);
  Workload workload(shape, seed);
  const auto begun = std::chrono::steady_clock::now();
  try {
    Simulation simulation(shape, options.audit_every, dir.path());
    for (; place.number < options.events; ++place.number) {
      if (options.replay.empty()) {
        place.event = workload.next(simulation);
      } else {
        std::string line;
        if (!std::getline(replay, line)) {
          break;
        }
        place.event = from_json(line);
      }
      if (!options.record.empty()) {
        record << to_json(place.event) << '\n' << std::flush;
      }
      simulation.apply(place.event);
    }
    place.event = {EventType::kSettle, {1}};
    simulation.apply(place.event);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begun;
    print(shape, seed, simulation.totals(), seconds.count());
    return true;
  } catch (const std::exception& error) {
    print_fault(error.what());
    return false;
  }
}

int main(const Options& options) {
  for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGTERM, SIGINT}) {
    std::signal(signal, die);
  }
  bool clean = true;
  bool found = false;
  for (const Shape& shape : shapes()) {
    if (options.shape != "all" && options.shape != shape.name) {
      continue;
    }
    found = true;
    for (uint64_t seed = options.seed; seed < options.seed + options.seeds; ++seed) {
      clean = run(options, shape, seed) && clean;
    }
  }
  if (!found) {
    std::fprintf(stderr, "sim: no shape '%s'\n%s\n", options.shape.c_str(), kUsage);
    return 2;
  }
  return clean ? 0 : 1;
}

}  // namespace
}  // namespace moelora::sim

int main(int argc, char** argv) {
  return moelora::sim::main(moelora::sim::parse(argc, argv));
}
