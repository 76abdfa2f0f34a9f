// SPDX-License-Identifier: Apache-2.0
// A whole engine, but for its thread, its clock, its model and its device: the caller says when it takes a step, what
// time it is and when an adapter on its way from disk to host memory, or a chunk of one to the device, arrives.
// Deterministic: between two calls the loaders' threads stand still. One at a time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/engine/engine_parts.h"
#include "tests/support/test_device.h"

namespace moelora::sim {

struct Shape {
  std::string name;
  int64_t num_pages = 512;
  int64_t slots = 8;          // of adapters
  int64_t sequences = 8;      // running at once
  int64_t batch_tokens = 64;  // rows of a step
  int64_t queue = 64;         // waiting requests
  int64_t context = 384;      // tokens
  int64_t buffer = 16;        // unread tokens that pause a request
  int64_t prefetched = 4;     // waiting requests whose adapters come ahead
  int32_t layers = 1;         // one group of pages; 8 make four groups of larger pages
  bool asynchronous = false;  // the device works beside the host
  bool fails_on_overrun = false;
  bool prefix_cache = true;
  int64_t host_granules = 0;  // KiB of host copies; 0 = no bound
  int64_t swap_pages = 0;     // of KV in host memory
  bool is_fair = false;       // between adapters
  bool refuses_early = false;
  // Of the events.
  int64_t names = 24;         // of adapters
  int64_t granules_max = 24;  // KiB of an adapter
  int64_t prompt_mean = 40;
  int64_t output_mean = 12;
  int64_t sessions = 8;
  int64_t active = 48;  // requests that are aimed at, at once
  double zipf = 1.0;
  int64_t folders = 300;  // permille of adapters that can be read again
};

// Monotonic, as the engine's clock is; in milliseconds.
double simulated_ms();
void pass_time(double ms);

// Where a loader's thread waits until the caller lets it pass.
class Gate {
 public:
  // `arrived` is called once it waits. Throws Error{status} if it was let pass so.
  void pass(const std::function<void()>& arrived);
  void open_once(Status status);
  void open();  // for good
  [[nodiscard]] bool is_waiting() const { return waiting_; }

 private:
  std::mutex mutex_;
  std::condition_variable change_;
  std::atomic<bool> waiting_{false};
  bool passes_ = false, open_ = false;
  Status status_ = Status::kOk;
};

class SimulatedEngine final : public Engine {
 public:
  SimulatedEngine(const Shape& shape, int64_t audit, const std::string& model_dir);
  ~SimulatedEngine();

  // False if nothing ran.
  bool step();
  // An adapter's chunk stands before the device; one stands before host memory.
  [[nodiscard]] bool has_upload() const { return device_->is_waiting(); }
  [[nodiscard]] bool has_read() const { return disk_->is_waiting(); }
  // It arrives, or fails with kLoadFailure.
  void let_upload_pass(bool fails);
  void let_read_pass(bool fails);
  static constexpr Status kLoadFailure = Status::kIo;

  [[nodiscard]] Parts& parts() { return *parts_; }
  // Every counter of every part, and the leases of every page against those who hold them.
  void audit_all(const std::vector<std::shared_ptr<Session>>& sessions);

 private:
  // Until neither loader has anything to do that it can do.
  void settle_loaders();

  std::shared_ptr<Gate> device_ = std::make_shared<Gate>();
  std::shared_ptr<Gate> disk_ = std::make_shared<Gate>();
};

}  // namespace moelora::sim
