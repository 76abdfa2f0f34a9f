// SPDX-License-Identifier: Apache-2.0
// The options of an engine: one table of keys with type, default and help, from which the config builder, TOML
// loading, their error messages and the documentation all come.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/base/device.h"
#include "kernels/base/error.h"
#include "kernels/base/tensor.h"

namespace moelora {

// How far the opening of a model is, and whether somebody wants it stopped. Shared by the config builder and
// Engine::create, which calls `report` between its parts.
struct LoadProgress {
  std::atomic<double> fraction{0.0};  // 0 to 1
  std::atomic<bool> abort{false};
  // Throws Error{kCancelled} if the host asked for it.
  void report(double done) {
    fraction.store(done);
    if (abort.load()) {
      throw Error(Status::kCancelled, "opening the model was cancelled by moelora_engine_abort_load");
    }
  }
};

struct EngineOptions {
  std::string device = "cpu";         // cpu | cuda | cuda:N
  int64_t num_threads = 0;            // CPU workers; 0 = one for each available core
  Compute compute = Compute::kExact;  // key "compute": exact | bf16
  std::string kv_dtype = "auto";      // auto | f32 | bf16
  bool deterministic = false;
  bool random_weights = false;
  int64_t seed = 0;                       // of random weights
  std::string random_routing = "random";  // of random weights: random | zipf | one (random_routing.h)
  double random_routing_exponent = 1.0;   // of zipf
  int64_t device_memory_bytes = 0;        // page pool, KV and adapters together; 0 = from the fraction
  double device_memory_fraction = 0.0;    // of free memory at creation; 0 = 0.25 on the CPU, 0.9 on a GPU
  int64_t host_memory_bytes = 0;          // host copies of adapters; 0 = no bound
  int64_t max_adapters_resident = 0;
  int64_t upload_bytes_per_second = 0;  // of adapters to the device; 0 = as fast as it goes
  int64_t max_lora_rank = 256;
  int64_t kv_block_tokens = 16;
  bool prefix_cache = true;
  int64_t max_num_sequences = 64;  // running at once
  int64_t max_batch_tokens = 0;    // rows of a step; 0 = 512 on the CPU, 4096 on a GPU
  int64_t max_queued_requests = 1024;
  int64_t prefetch_requests = 16;           // of those who wait; their adapters come ahead
  std::string fairness = "arrival";         // arrival | adapter
  int64_t max_overtaking_steps = 256;       // before one that lacks a slot or pages
  int64_t max_loads_per_step = 32;          // of adapters, begun
  int64_t swap_memory_bytes = 0;            // host copies of preempted sequences' KV; 0 = never
  bool early_refusal = false;               // end requests early whose deadline cannot be met
  int64_t max_context_tokens = 0;           // 0 = the model's
  int64_t output_buffer_tokens = 4096;      // tokens a request holds unread before it pauses
  std::string overrun = "pause";            // pause | fail
  std::string expert_orientation = "auto";  // auto | natural | reversed (formats of 3-D expert adapters)
  std::string expert_b_layout = "auto";     // auto | rank_major | grouped_by_expert
  std::string kernels = "auto";             // auto | reference (CPU: the plain loops)
  bool graphs = true;                       // GPU: decode steps as recorded graphs
  int64_t audit = 0;                        // 0 off, 1 at load and close, 2 every step
  int64_t timeline_events = 0;              // kept for write_timeline; 0 = off
  int64_t metrics_adapters = 256;           // adapters with series of their own in the metrics' text
  std::shared_ptr<LoadProgress> progress;   // not a key; null = nobody watches
  // Not a key; tests put a device between engine and device.
  std::function<std::unique_ptr<Device>(std::unique_ptr<Device>)> wrap_device;
};

enum class OptionType : uint8_t { kString, kInt, kNumber, kBool };
struct OptionKey {
  const char* name;
  OptionType type;
  const char* default_text;
  const char* help;
};
const std::vector<OptionKey>& option_keys();

// Setters check key, type and range; throw Error{kInvalid} naming the key, its range and, for an unknown key, near
// matches. Bools accept set_int 0/1 and set_string "true"/"false".
void set_option(EngineOptions& options, const std::string& key, const std::string& value);
void set_option(EngineOptions& options, const std::string& key, int64_t value);
void set_option(EngineOptions& options, const std::string& key, double value);
// Reads a TOML table of keys (toml++); `source` names the file in messages, which give line and key.
void load_options_toml(EngineOptions& options, const std::string& text, const std::string& source);

}  // namespace moelora
