// SPDX-License-Identifier: Apache-2.0
// Copies images to the device beside the steps: a thread of its own moves a stream chunk by chunk into a small ring of
// page-locked memory and queues each chunk on the device's copy stream, so that the engine thread neither copies nor
// waits. On the CPU chunks go from the stream to their pages at once. A stream that is still being made is copied as it
// grows. Uploads run one after the other, in the order of `add`, but one whose stream has to grow first lets the others
// pass. Memory for all of it is taken at construction.
// AdapterCache is the only caller, on the engine thread.
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

#include "kernels/kernels.h"
#include "runtime/adapter/adapter_image.h"
#include "runtime/adapter/loads_on_their_way.h"
#include "runtime/memory/page_pool.h"

namespace moelora {

// One upload. The pages stay leased and `pages` as it is until it was taken.
struct Upload {
  int32_t slot = 0;
  std::shared_ptr<const AdapterImage> image;
  const PageId* pages = nullptr;           // host memory
  std::atomic<uint64_t>* bytes = nullptr;  // grows to the stream's size; may be null
  Status status = Status::kOk;
  std::string message;
  double ms = 0;  // of its turns, until its last byte is on the device; not waiting for its stream
};

class AdapterUploader {
 public:
  static constexpr size_t kMaxUploads = LoadsOnTheirWay::kMax;

  // `wake` is called on the loader's thread after each upload; it may be empty. `bytes_per_second` bounds the mean rate
  // from the second chunk on; 0 = no bound.
  AdapterUploader(const PagePool& pool, Device& device, const Kernels& kernels, std::function<void()> wake,
                  int64_t bytes_per_second = 0);
  ~AdapterUploader();
  AdapterUploader(const AdapterUploader&) = delete;
  AdapterUploader& operator=(const AdapterUploader&) = delete;

  // Host memory of the ring; none on the CPU.
  [[nodiscard]] static uint64_t staging_bytes(int64_t page_bytes, bool is_host);

  [[nodiscard]] bool is_full() const {
    return LoadsOnTheirWay::is_full(static_cast<size_t>(num_added_ - num_taken_), num_bytes_);
  }
  [[nodiscard]] int32_t num_begun() const { return static_cast<int32_t>(num_added_ - num_taken_); }
  [[nodiscard]] bool is_empty() const { return num_added_ == num_taken_; }
  // Some of what was added has not ended yet, and does not wait for its stream to grow. For tests.
  [[nodiscard]] bool is_working();
  void add(int32_t slot, std::shared_ptr<const AdapterImage> image, const PageId* pages,
           std::atomic<uint64_t>* bytes = nullptr);
  // The oldest upload that has ended: all its bytes are on the device, or status and message say why not and nothing is
  // written to its pages any more (kCancelled also if its stream will never be whole). False if there is none.
  [[nodiscard]] bool take(Upload* out);
  // Nobody needs the upload of this slot: it ends soon, with kCancelled if some of it was still to be copied.
  void cancel(int32_t slot);
  // No page is written after this. Idempotent.
  void stop();

 private:
  static constexpr size_t kNumChunks = 3;  // one is filled while one is on its way, and one to spare
  struct Chunk {
    std::byte* memory = nullptr;  // null: none is needed
    std::unique_ptr<Fence> fence;
  };
  // An upload that has begun or waits.
  struct Entry {
    Upload upload;
    std::atomic<int64_t> num_copied{0};  // bytes; the loader's thread writes it
    std::atomic<bool> cancelled{false};
  };
  void run();
  // The first that has something to do, or null; under the lock.
  [[nodiscard]] Entry* next();
  [[nodiscard]] bool can_go_on(const Entry& entry) const;
  // True if it has ended; status and message are set then.
  bool take_turn(Entry& entry);
  void end(Entry& entry);
  // Throws Error if it failed. True if it is whole.
  bool copy(Entry& entry);
  // Throws if the upload was given up or the uploader stopped, also while it waits for the time that the rate allows.
  void wait_for_turn(const Entry& entry);
  void fill(std::byte* to, const std::byte* from, int64_t bytes);
  void release_staging();

  const PagePool& pool_;
  Device& device_;
  const Kernels& kernels_;
  std::function<void()> wake_;
  int64_t chunk_bytes_;  // whole pages
  int64_t bytes_per_second_;
  std::chrono::steady_clock::time_point next_chunk_;  // not before; of the loader's thread
  std::unique_ptr<Stream> stream_;
  Stream copiers_;  // fill the ring
  std::byte* staging_ = nullptr;
  Chunk chunks_[kNumChunks];

  std::mutex mutex_;
  std::condition_variable work_;
  Entry entries_[kMaxUploads];
  Entry* ring_[kMaxUploads] = {};           // entries_ in order: ended, then those that have not; under the lock
  uint64_t num_added_ = 0, num_taken_ = 0;  // of the engine thread; num_added_ is written under the lock
  uint64_t num_bytes_ = 0;                  // of streams added and not taken; of the engine thread
  uint64_t num_done_ = 0;                   // under the lock
  size_t num_chunks_ = 0;                   // filled so far; of the loader's thread
  bool has_entered_ = false;                // the loader's thread, the device
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace moelora
