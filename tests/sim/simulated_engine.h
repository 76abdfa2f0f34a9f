// SPDX-License-Identifier: Apache-2.0
// A whole engine, but for its thread, its clock, its model and its device: the caller says when it takes a step, what
// time it is and when a chunk of an adapter on its way arrives. Deterministic: between two calls the loader's thread
// stands still.
#pragma once

#include <atomic>
#include <condition_variable>
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
  // Of the events.
  int64_t names = 24;         // of adapters
  int64_t granules_max = 24;  // KiB of an adapter
  int64_t prompt_mean = 24;
  int64_t output_mean = 12;
  int64_t sessions = 8;
  int64_t active = 48;  // requests that are aimed at, at once
  double zipf = 1.0;
};

// Monotonic, as the engine's clock is; in milliseconds.
double simulated_ms();
void pass_time(double ms);

class SimulatedEngine final : public Engine {
 public:
  SimulatedEngine(const Shape& shape, int64_t audit, const std::string& model_dir);
  ~SimulatedEngine();

  // False if nothing ran.
  bool step();
  // An adapter's chunk stands before the device.
  [[nodiscard]] bool has_upload() const { return gate_->is_waiting(); }
  // It arrives, or its upload fails with kIo.
  void let_upload_pass(bool fails);
  // Requests that may end with an upload's failure do so with this.
  static constexpr Status kUploadFailure = Status::kIo;

  [[nodiscard]] Parts& parts() { return *parts_; }
  // Every counter of every part, and the leases of every page against those who hold them.
  void audit_all(const std::vector<std::shared_ptr<Session>>& sessions);

 private:
  // Where the loader's thread waits behind each chunk.
  class Gate {
   public:
    void pass(const std::function<void()>& arrived);
    void open_once(bool fails);
    void open();  // for good
    [[nodiscard]] bool is_waiting() const { return waiting_; }

   private:
    std::mutex mutex_;
    std::condition_variable change_;
    std::atomic<bool> waiting_{false};
    bool passes_ = false, fails_ = false, open_ = false;
  };
  // Until the loader has nothing to do or stands at the gate.
  void settle_loader();

  std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
};

}  // namespace moelora::sim
