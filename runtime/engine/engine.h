// SPDX-License-Identifier: Apache-2.0
// Engine: one opened base model on its device. Owns every part and the one thread that touches the device. The
// public functions may be called from any thread; they hand work to the engine thread and do not wait for the
// device, except where stated. `step` is the spine: admit, schedule, stage, forward, sample, commit, emit.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "runtime/adapter/adapter.h"
#include "runtime/adapter/adapter_image.h"
#include "runtime/engine/histogram.h"
#include "runtime/engine/options.h"
#include "runtime/engine/request.h"
#include "runtime/engine/sequence.h"
#include "runtime/engine/session.h"
#include "runtime/engine/token_stream.h"
#include "runtime/model/config.h"

namespace moelora {

struct EngineInfo {
  ModelConfig config;
  std::string device_name;
  bool is_cuda = false;
  int32_t max_context_tokens = 0;
  int32_t max_num_sequences = 0;
  int32_t max_batch_tokens = 0;
  int32_t kv_block_tokens = 0;
  int64_t page_bytes = 0;
  std::string page_reason;  // why that size
  int64_t num_pages = 0;
  int32_t pages_per_block = 0;  // of a sequence's 16 tokens, all layers
  int32_t num_threads = 0;
  int32_t max_adapters_resident = 0;
  int32_t max_lora_rank = 0;
  uint64_t weight_bytes = 0;
  uint64_t pool_bytes = 0;
  uint64_t workspace_bytes = 0;
};

struct EngineStats {  // monotonic counters and gauges
  uint64_t steps = 0, requests_submitted = 0, requests_finished = 0, requests_cancelled = 0, requests_failed = 0;
  uint64_t prompt_tokens = 0, cached_tokens = 0, output_tokens = 0, preemptions = 0, swaps = 0, sessions_evicted = 0;
  uint64_t adapter_loads = 0, adapter_evictions = 0, adapter_hits = 0;
  uint64_t active_expert_sum = 0, moe_layer_steps = 0;  // active experts a layer = sum / layer_steps
  uint64_t adapters_touched_last = 0;
  uint64_t adapter_load_bytes = 0;  // of uploads that arrived
  int64_t running = 0, waiting = 0, adapters_registered = 0, adapters_resident = 0, sessions = 0;
  int64_t pages_total = 0, pages_free = 0, pages_kv = 0, pages_adapter = 0;
  uint64_t adapter_host_bytes = 0;
  double last_step_ms = 0, steps_ms = 0;
  // Of leased pages: what no stream and no position of a block uses; positions of blocks that no token has yet.
  int64_t page_bytes_wasted = 0, kv_bytes_unfilled = 0;
  // Tiers of adapters; clones count once. Host copies include those on their way from the disk.
  int64_t adapters_in_host_memory = 0, adapters_on_disk_only = 0;
  uint64_t adapter_host_loads = 0, adapter_host_evictions = 0;
  double adapter_read_ms = 0, adapter_pack_ms = 0, adapter_upload_ms = 0;  // of all loads after registration
  int64_t adapters_loading = 0;
  uint64_t prefix_queries = 0, prefix_query_tokens = 0, prefix_hit_tokens = 0, prefix_evictions = 0;
  int64_t prefix_blocks = 0, pages_cached = 0;  // pages_cached: KV that no sequence or session holds
  Histogram step, queue, first_token, request;

  [[nodiscard]] double mean_active_experts() const {  // a MoE layer and step; 0 for dense models
    return moe_layer_steps == 0 ? 0.0 : static_cast<double>(active_expert_sum) / static_cast<double>(moe_layer_steps);
  }
};

// Requests of one adapter now.
struct AdapterQueue {
  uint64_t adapter = 0;  // Adapter::id
  int32_t running = 0, waiting = 0;
};

// One step as the bench sees it (ring of the last steps, experimental).
struct StepRecord {
  double start_ms = 0, ms = 0;
  int32_t rows = 0, prefill_rows = 0, sequences = 0, adapters = 0;
  float active_experts = 0;
  double lora_bytes = 0, kv_bytes = 0;
};

class Engine {
 public:
  // Opens DIR. Blocking. Throws Error.
  static std::shared_ptr<Engine> create(const EngineOptions& options, const std::string& model_dir);
  ~Engine();  // cancels everything, wakes all waiters, joins the thread
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  [[nodiscard]] const EngineInfo& info() const;
  [[nodiscard]] const EngineOptions& options() const;
  [[nodiscard]] EngineStats stats() const;
  // Of every adapter that requests run with or wait for, in order of id.
  [[nodiscard]] std::vector<AdapterQueue> adapter_queues() const;
  // Writes the events that are kept (option timeline_events) as a trace for Chrome or Perfetto. Steps go on meanwhile.
  // Throws Error: kInvalid without that option, kIo.
  void write_timeline(const std::string& path) const;
  // kOk, or the fatal status with its text.
  Status health(std::string* message) const;
  // No new work from here on; waits until all is finished: kOk or kTimeout.
  Status drain(int32_t timeout_ms);
  // Drops idle adapters, cached blocks and sessions' KV until pool pages in use <= target bytes, as far as possible.
  void trim(uint64_t target_bytes);

  // Adapters. Throw Error.
  // An image with a folder (load_adapter_dir) may leave host memory and is read again when it is wanted.
  std::shared_ptr<Adapter> register_adapter(const std::string& name, std::shared_ptr<const AdapterImage> image,
                                            float scale, bool replace);
  // Another one with the image of a registered adapter.
  std::shared_ptr<Adapter> register_adapter(const std::string& name, std::shared_ptr<TieredImage> image, float scale,
                                            bool replace);
  struct AdapterPlace {
    bool in_host_memory = false;
    uint64_t bytes_uploaded = 0;  // of its stream: to the device, by its last upload
    uint64_t fingerprint = 0;     // these two are known once its values were read
    double pack_ms = 0;
  };
  AdapterPlace adapter_place(const Adapter& adapter) const;
  [[nodiscard]] AdapterLoadOptions adapter_load_options() const;
  std::shared_ptr<Adapter> find_adapter(const std::string& name) const;  // null = none
  std::vector<std::shared_ptr<Adapter>> list_adapters() const;
  // New requests are refused at once; memory goes with the last user. if_idle: kBusy if in flight.
  void unload_adapter(const std::shared_ptr<Adapter>& adapter, bool if_idle);
  // Of the base where `adapter` is null; for option fairness = adapter. Throws kInvalid.
  void set_weight(const std::shared_ptr<Adapter>& adapter, double weight);
  // Asks for residency; when there, pushes kAdapterReady to `queue` (may be null).
  void prefetch_adapter(const std::shared_ptr<Adapter>& adapter, std::shared_ptr<CompletionQueue> queue,
                        uint64_t handle, uint64_t tag);

  // Sessions. Throw Error.
  std::shared_ptr<Session> create_session(std::shared_ptr<Adapter> adapter, float scale);
  std::shared_ptr<Session> fork_session(const std::shared_ptr<Session>& session);
  void rollback_session(const std::shared_ptr<Session>& session, int64_t num_tokens);
  void close_session(const std::shared_ptr<Session>& session);
  struct SessionInfo {
    int64_t num_tokens = 0;
    int64_t num_computed = 0;
    int32_t num_blocks = 0;
    bool resident = false;
    bool busy = false;
  };
  SessionInfo session_info(const std::shared_ptr<Session>& session) const;

  // Checks the request (token ids, lengths, budget, adapter state) and queues it. Throws Error: kInvalid,
  // kContextLength, kDeviceNomem (can never fit), kOverloaded, kBusy (session), kClosed (draining), kNotFound
  // (unloaded). `stream` is built by the caller over the same request (its handle is needed in events).
  void submit(const std::shared_ptr<Submission>& submission);
  void submit_batch(const std::vector<std::shared_ptr<Submission>>& submissions, std::vector<Error>* errors);
  void cancel(const std::shared_ptr<Submission>& submission, bool drop_turn);
  void notify();  // the reader made room, or something else changed

  // Experimental: for `moelora bench`.
  std::vector<StepRecord> step_records(size_t max) const;  // newest last
  double measure_read_bandwidth();  // bytes/s over this engine's weights with this engine's threads; call while idle or
                                    // between steps
  double weight_bytes(double active_experts) const;

  class Parts;  // everything behind the thread; engine_parts.h

 protected:  // tests/sim takes the steps itself
  Engine();
  std::unique_ptr<Parts> parts_;

 private:
  std::shared_ptr<Sequence> make_sequence(const std::shared_ptr<Submission>& submission);
  void enqueue(std::shared_ptr<Sequence> sequence);
};

}  // namespace moelora
