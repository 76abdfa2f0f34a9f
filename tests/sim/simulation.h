// SPDX-License-Identifier: Apache-2.0
// A simulated engine beside a plain model of what it owes its host: which tokens each request gets, how it may end,
// what a session holds, which adapters are there. `apply` does an event to both and throws where they differ.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "tests/sim/event.h"
#include "tests/sim/simulated_engine.h"
#include "tests/sim/stamp_ops.h"

namespace moelora::sim {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Tokens with the stamps that their KV must hold.
struct Text {
  std::vector<int32_t> tokens;
  std::vector<Stamp> stamps;
};

struct SimAdapter {
  int64_t number = 0;
  std::shared_ptr<Adapter> adapter;
  AdapterKey key;  // its scale is the adapter's own
  int64_t pins = 0;
  int64_t in_flight = 0;
  bool is_unloaded = false;
};

// An image whose last adapter was unloaded: it goes with its last user.
struct SimUnloaded {
  uint64_t image = 0;
  std::weak_ptr<const TieredImage> memory;
  uint64_t unused_since = 0;  // step; 0 = it is used
};

struct SimSession {
  int64_t number = 0;
  std::shared_ptr<Session> session;
  std::shared_ptr<SimAdapter> adapter;  // null = base
  AdapterKey key;
  Text text;
  bool is_busy = false;
  bool is_closed = false;
};

struct SimRequest {
  int64_t number = 0;
  std::shared_ptr<Submission> submission;
  std::shared_ptr<SimAdapter> adapter;
  std::shared_ptr<SimSession> session;
  AdapterKey key;
  Text text;  // history, prompt, and what was delivered
  size_t num_history = 0, num_prompt = 0, tokens_max = 0;
  uint64_t seed = 0;
  int64_t salt = 0;
  size_t num_delivered = 0, num_read = 0;
  uint64_t num_failed_loads = 0;  // of all, when it was submitted
  double cancelled_ms = 0;        // when that was asked; 0 = not
  bool drops_turn = false, is_slow = false, has_ended = false;
  size_t place = 0;  // in Simulation::active()
};

struct SimTotals {
  uint64_t events = 0, steps = 0, rows = 0, requests = 0, refused = 0, tokens = 0;
  uint64_t ends[6] = {};  // by FinishReason
  uint64_t prefix_hit_tokens = 0, prefix_evictions = 0;
  uint64_t disk_loads = 0, host_evictions = 0, swaps = 0;
  uint64_t loads = 0, evictions = 0, hits = 0, preemptions = 0, sessions_evicted = 0;
  uint64_t loads_failed = 0, settled = 0, idle_steps_max = 0, steps_without_token_max = 0;
};

class Simulation {
 public:
  // A full audit comes with every step, or with each `audit_every`th.
  Simulation(const Shape& shape, int64_t audit_every, const std::string& model_dir);
  ~Simulation();

  void apply(const Event& event);
  // Everybody reads, nothing is pinned, and the engine works until it has nothing left to do. `close_all` closes
  // sessions and unloads adapters: then every page is free.
  void settle(bool close_all);

  // For who makes events.
  [[nodiscard]] const std::vector<SimRequest*>& active() const { return active_; }
  [[nodiscard]] const std::vector<std::shared_ptr<SimAdapter>>& adapters() const { return adapters_; }
  [[nodiscard]] const std::vector<std::shared_ptr<SimSession>>& sessions() const { return sessions_; }
  [[nodiscard]] bool has_upload() const { return engine_->has_upload(); }
  [[nodiscard]] bool has_read() const { return engine_->has_read(); }
  [[nodiscard]] const Shape& shape() const { return shape_; }
  [[nodiscard]] SimTotals totals() const;

 private:
  template <class Numbered>
  static std::shared_ptr<Numbered> find(const std::vector<std::shared_ptr<Numbered>>& all, int64_t number);
  void step(int64_t microseconds);
  void submit(const Event& event, bool is_turn);
  void enter(std::unique_ptr<SimRequest> request);
  void cancel(SimRequest& request, bool drop_turn);
  // A fresh image, or that of `source`.
  void load(int64_t number, int64_t name, int64_t granules, int64_t permille, bool has_folder,
            const SimAdapter* source);
  void unload(const std::shared_ptr<SimAdapter>& adapter, bool if_idle);
  void pin(SimAdapter& adapter, int64_t count);
  void open_session(int64_t number, const std::shared_ptr<SimAdapter>& adapter, int64_t permille);
  void fork_session(int64_t number, const SimSession& source);
  void rollback(SimSession& session, int64_t permille);
  void close_session(const std::shared_ptr<SimSession>& session);
  void upload(bool fails);
  void read_disk(bool fails);

  // What the engine has told since.
  void collect_events();
  void read(SimRequest& request, size_t most);
  void finish(SimRequest& request);
  void check_result(const SimRequest& request, const RequestResult& result) const;
  void check_progress(bool ran, uint64_t tokens_before);
  void check_counters() const;
  void check_unloaded();
  void audit_all();
  [[nodiscard]] bool must_progress() const;
  // Who holds what, for a fault that is about waiting.
  [[nodiscard]] std::string state() const;
  [[noreturn]] void fail(const std::string& what) const { throw Failure(what); }
  void check(bool holds, const std::string& what) const {
    if (!holds) {
      fail(what);
    }
  }
  [[noreturn]] void fail(const SimRequest& request, const std::string& what) const;

  Shape shape_;
  int64_t audit_every_;
  std::unique_ptr<SimulatedEngine> engine_;
  std::shared_ptr<CompletionQueue> queue_ = std::make_shared<CompletionQueue>();
  std::unordered_map<int64_t, std::unique_ptr<SimRequest>> requests_;  // not ended
  std::vector<SimRequest*> active_;
  std::vector<std::shared_ptr<SimAdapter>> adapters_;  // not unloaded
  std::vector<std::shared_ptr<SimSession>> sessions_;  // not closed
  std::unordered_map<int64_t, std::shared_ptr<SimAdapter>> names_;
  std::vector<SimUnloaded> unloaded_;
  double step_begun_ms_ = 0, step_before_ms_ = 0;
  uint64_t idle_steps_ = 0, steps_without_token_ = 0;
  uint64_t num_prefetches_ = 0;  // not answered
  SimTotals totals_;
};

}  // namespace moelora::sim
