// SPDX-License-Identifier: Apache-2.0
// Reads adapters from their folders beside the steps: a thread of its own, one read after the other in the order of
// `add`. What it reads can be copied on while it grows (`growing`). It also frees the host copies that are let go,
// which takes milliseconds a large one. HostTier is the only caller, under the engine's lock.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kernels/base/error.h"
#include "runtime/adapter/loads_on_their_way.h"
#include "runtime/adapter/tiered_image.h"

namespace moelora {

struct AdapterRead {
  std::shared_ptr<TieredImage> image;
  std::shared_ptr<AdapterImage> growing;       // from the time that its stream is being filled
  std::shared_ptr<const AdapterImage> loaded;  // null if it failed or was cancelled
  Status status = Status::kOk;
  std::string message;
};

class AdapterReader {
 public:
  // Each has its bytes of the budget from `add` on.
  static constexpr size_t kMaxReads = LoadsOnTheirWay::kMax;

  // `wake` is called on the reader's thread when a stream begins to grow and after each read; it may be empty. `config`
  // is the model's, and not null if anything is read. The mean rate of reading, in bytes of streams, stays below
  // `bytes_per_second`; 0 = no bound.
  AdapterReader(const ModelConfig* config, std::function<void()> wake, int64_t bytes_per_second);
  ~AdapterReader() { stop(); }
  AdapterReader(const AdapterReader&) = delete;
  AdapterReader& operator=(const AdapterReader&) = delete;

  [[nodiscard]] bool is_full() const {
    return LoadsOnTheirWay::is_full(static_cast<size_t>(num_added_ - num_taken_), num_bytes_);
  }
  [[nodiscard]] bool is_empty() const { return num_added_ == num_taken_; }
  // Some of what was added has not ended yet, or those who copy its stream do not know yet.
  [[nodiscard]] bool is_working();
  void add(std::shared_ptr<TieredImage> image);
  // Sets `growing` of the image whose stream is being filled, if any: it has all facts but the fingerprint, and its
  // progress finishes, or fails, after its read can be taken.
  void show_growing();
  // The oldest read that has ended. False if there is none.
  [[nodiscard]] bool take(AdapterRead* out);
  // Nobody needs it: if it has not begun, it ends with kCancelled.
  void cancel(const TieredImage& image);
  // What stays for the next load when a copy is let go.
  enum class Keep : uint8_t { kMemory, kPlans, kNothing };
  // Frees the copy, which may be null, on the reader's thread, before it reads the next one; `cache`, which may be
  // null, keeps what it may. No memory is taken for up to `reserve`d calls.
  void discard(std::shared_ptr<const AdapterImage> copy, std::shared_ptr<LoadCache> cache, Keep keep);
  void reserve(size_t num_calls);
  // Ends after the read that has begun, if any. Idempotent.
  void stop();

 private:
  struct Discarded {
    std::shared_ptr<const AdapterImage> copy;
    std::shared_ptr<LoadCache> cache;
    Keep keep = Keep::kMemory;
  };
  void run();
  void free_discarded(std::unique_lock<std::mutex>& lock);
  void free(Discarded& discarded);
  [[nodiscard]] uint64_t bytes_awaited();  // of the reads that have not begun
  void wait_for_work(std::unique_lock<std::mutex>& lock);
  [[nodiscard]] bool is_due() const;  // under the lock
  void read(AdapterRead& read);
  void end(AdapterRead& read);

  const ModelConfig* config_;
  std::function<void()> wake_;
  int64_t bytes_per_second_;
  std::chrono::steady_clock::time_point next_read_;  // not before; of the reader's thread
  std::mutex mutex_;
  std::condition_variable work_;
  AdapterRead ring_[kMaxReads];
  bool cancelled_[kMaxReads] = {};          // under the lock
  uint64_t num_added_ = 0, num_taken_ = 0;  // of the caller; num_added_ is written under the lock
  uint64_t num_bytes_ = 0;                  // of streams added and not taken; of the caller
  uint64_t num_begun_ = 0, num_done_ = 0;   // under the lock
  std::vector<Discarded> discarded_;        // under the lock
  std::vector<Discarded> freeing_;          // of the reader's thread; takes turns with discarded_
  size_t num_reserved_ = 0;                 // under the lock
  bool is_telling_ = false;                 // under the lock; the progress of what has just ended
  bool stopping_ = false;                   // under the lock
  std::thread thread_;
};

}  // namespace moelora
