// SPDX-License-Identifier: Apache-2.0
// Where an op runs. On the CPU a Stream is a private thread pool: `parallel` runs a task on every
// worker and returns when all are done, so ops on one Stream are ordered. On a GPU it names the device's queue, ops
// return once their work is queued, and `parallel` must not be called. One Stream belongs to one engine thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace moelora {

class Stream {
 public:
  // `num_threads` >= 1 counts the calling thread, which works as worker 0. The num_threads - 1 threads
  // started here block all signals. Scratch of `scratch_bytes` a worker, 64-byte aligned, is taken here
  // so that ops allocate nothing.
  Stream(int num_threads, size_t scratch_bytes);
  // A queue of a device; `native` is the backend's own (kernels/cuda/cuda_stream.h), owned by the caller, not null.
  explicit Stream(void* native) : num_threads_(0), scratch_bytes_(0), native_(native) {}
  virtual ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  [[nodiscard]] int num_threads() const { return num_threads_; }
  [[nodiscard]] std::byte* scratch(int worker) const { return scratch_[static_cast<size_t>(worker)]; }
  [[nodiscard]] size_t scratch_bytes() const { return scratch_bytes_; }
  [[nodiscard]] void* native() const { return native_; }

  // Nested ranges that a profiler shows around what is queued between them; `number` is a layer, rows ...
  virtual void begin_range(const char* /*name*/, int64_t /*number*/) {}
  virtual void end_range() {}

  // Runs task(worker) on every worker, worker in [0, num_threads); returns when all have returned.
  // `Task` is any callable; it is called through a pointer to the caller's object: nothing is allocated.
  template <class Task>
  void parallel(const Task& task) {
    run([](const void* context, int worker) { (*static_cast<const Task*>(context))(worker); }, &task);
  }

  // Splits [0, count) into chunks taken from an atomic ticket: task(index, worker). Which worker takes
  // which index varies; a task must own its outputs alone, so that results do not depend on it.
  template <class Task>
  void parallel_for(size_t count, const Task& task) {
    if (count == 0) {
      return;
    }
    if (count == 1 || num_threads_ == 1) {
      for (size_t index = 0; index < count; ++index) {
        task(index, 0);
      }
      return;
    }
    std::atomic<size_t> ticket{0};
    parallel([&](int worker) {
      for (;;) {
        const size_t index = ticket.fetch_add(1, std::memory_order_relaxed);
        if (index >= count) {
          return;
        }
        task(index, worker);
      }
    });
  }

 private:
  using Entry = void (*)(const void*, int);
  void run(Entry entry, const void* context);
  void worker_loop(int worker);

  int num_threads_;
  size_t scratch_bytes_;
  void* native_ = nullptr;
  std::vector<std::byte*> scratch_;
  std::vector<std::thread> threads_;
  Entry entry_ = nullptr;
  const void* context_ = nullptr;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> remaining_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<int> sleeping_{0};
};

// A range for as long as it lives.
class ProfileRange {
 public:
  ProfileRange(Stream& stream, const char* name, int64_t number) : stream_(stream) { stream.begin_range(name, number); }
  ~ProfileRange() { stream_.end_range(); }
  ProfileRange(const ProfileRange&) = delete;
  ProfileRange& operator=(const ProfileRange&) = delete;

 private:
  Stream& stream_;
};

}  // namespace moelora
