// SPDX-License-Identifier: Apache-2.0
// What is behind Engine: every part in order of dependency, the engine thread, the one lock. Included by the
// engine_*.cc files alone. The lock guards scheduler, pool, sessions and the registry of adapters; it is never held
// while the device works. Adapter slots are touched by the engine thread only.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "kernels/kernels.h"
#include "runtime/adapter/load_cache.h"
#include "runtime/engine/engine.h"
#include "runtime/engine/scheduler.h"
#include "runtime/engine/step_input.h"
#include "runtime/engine/timeline.h"
#include "runtime/memory/prefix_cache.h"
#include "runtime/model/model.h"

namespace moelora {

double now_ms();  // monotonic

struct Prefetch {
  std::shared_ptr<Adapter> adapter;
  std::shared_ptr<CompletionQueue> queue;  // null: nobody is told
  uint64_t handle = 0;
  uint64_t tag = 0;
  bool answered = false;
  Status status = Status::kOk;
};

// A token or an end that commit or admit decided and emit hands out, without the lock. On a device that works beside
// the host, those of a step go out once the next one is on its way.
struct Emission {
  std::shared_ptr<Submission> submission;
  int32_t sampled_index = -1;  // index into outputs; -1 = no token
  int32_t position = 0;        // of the token among the outputs
  bool in_text = true;         // false for one that ended the output
  bool finished = false;
  RequestResult result;
};

class Engine::Parts {
 public:
  Parts(const EngineOptions& options, const std::string& model_dir);
  ~Parts();
  void start();
  void stop();

  // One turn: false if there was nothing to run.
  bool step();
  void wake();
  // Under the lock. Throws the failure, if there was one: then nothing runs any more.
  void check_alive() const;
  void audit_parts() const;  // under the lock; throws Error{kInternal}
  // Under the lock, on a thread of the host: the queue, if any, will be told if the engine fails.
  void note_queue(const std::shared_ptr<CompletionQueue>& queue);
  void open_prefix(Sequence& sequence);
  void drop_prefix(const Adapter& adapter);

  EngineOptions options;
  ModelConfig config;
  std::unique_ptr<Device> device;  // before, and so released after, all that lives on it
  std::unique_ptr<Weights> weights;
  const Kernels* kernels = nullptr;
  KvGeometry geometry;
  EngineInfo info;
  std::unique_ptr<Stream> stream;
  std::unique_ptr<PagePool> pool;
  std::unique_ptr<PrefixCache> prefix;                                    // null: option prefix_cache = false
  std::shared_ptr<LoadCache> load_cache = std::make_shared<LoadCache>();  // images hold it too
  std::unique_ptr<AdapterCache> adapters;
  std::unique_ptr<SwapSpace> swap_space;  // null without swap_memory_bytes
  std::unique_ptr<Scheduler> scheduler;
  std::unique_ptr<Workspace> workspace;
  std::unique_ptr<StepInput> step_input;
  std::unique_ptr<Model> model;

  mutable std::mutex mutex;
  std::condition_variable work;      // the engine thread waits here
  std::condition_variable progress;  // drain and measure_read_bandwidth wait here
  // Under the lock.
  std::vector<std::shared_ptr<Sequence>> inbox;
  std::vector<Prefetch> prefetches;
  std::set<std::weak_ptr<CompletionQueue>, std::owner_less<>> queues;  // room for an event is announced to each
  size_t num_queues_swept = 64;                                        // that many are too many to keep dead ones
  EngineStats counters;
  Status failure = Status::kOk;
  std::string failure_message;
  bool draining = false;
  bool stopping = false;
  bool woken = false;
  bool collect_adapters = false;
  int64_t trim_pages = -1;
  uint64_t arrivals = 0;
  uint64_t probes_wanted = 0, probes_done = 0;
  double probe_bandwidth = 0;
  std::vector<StepRecord> records;  // ring
  uint64_t num_records = 0;
  Timeline timeline;

 private:
  void run();
  // The seven verbs.
  void admit(double now);
  void stage();
  void forward();
  void sample();
  void commit(double now);
  void emit();
  void deliver();

  void swap_pages();
  void note_rates(double ms);
  void admit_inbox();
  void end_by_host(double now);
  void poll_loads(double now);
  void admit_prefetches();
  void finish_prefetches();
  void commit_token(Sequence& sequence, int32_t sampled_index, double now);
  // Short messages only: a string of up to 15 characters allocates nothing.
  void end_sequence(Sequence& sequence, FinishReason reason, Status status, std::string_view message, double now);
  void cache_blocks();
  void keep_captured_rows();
  void fail(Status status, const std::string& message);
  void tell_queues(Status status);
  void probe_bandwidth_now();
  void open_device();
  void open_weights(const std::string& model_dir);
  void size_up();
  void open_swap_space();
  void record_graphs();
  [[nodiscard]] Graph* graph_of_batch() const;
  void count_prompt(const Sequence& sequence, const BatchEntry& entry);
  void record_step(double start, double end);
  void record_upload(const Adapter& adapter, double ms);
  void record_end(const Sequence& sequence, double now);

  Batch batch_;
  std::vector<std::unique_ptr<Graph>> graphs_;  // [rows - 1][graph_sets_], decode steps
  // Modules of adapters that steps are recorded for (LoraBatch::modules), each set within the next.
  std::vector<uint32_t> graph_sets_;
  std::vector<FailedLoad> failed_loads_;
  std::vector<float> captured_;         // one row of logits on its way to a reader
  uint32_t totals_before_[2] = {0, 0};  // of MoeOrder::totals, at the last step
  uint64_t loads_before_ = 0;           // at the last step
  std::vector<SampleOutput> outputs_;
  std::vector<Emission> emissions_;  // the first num_emissions_ are live; strings keep their capacity
  size_t num_emissions_ = 0;
  size_t probe_area_ = 0;
  size_t probe_offset_ = 0;
  std::thread thread_;
};

}  // namespace moelora
