// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/stream.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#include "kernels/base/error.h"
#include "kernels/base/thread.h"

namespace moelora {
namespace {

// Between two ops of a step a worker waits microseconds, between two steps perhaps for ever: spin for
// about 50 us, then sleep, so that an idle engine uses no CPU.
constexpr int kSpins = 2000;

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Scratch of a worker on huge pages where the system has them: tiles of weights are read from it again and again,
// and 4 KiB pages scattered over physical memory collide in the second-level cache (measured: 4 %).
std::byte* take_scratch(size_t bytes) {
  constexpr size_t kHugePage = size_t{2} << 20;
  const size_t alignment = bytes >= kHugePage ? kHugePage : 64;
  const size_t rounded = (std::max<size_t>(bytes, 1) + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, rounded);
  if (memory != nullptr && alignment == kHugePage) {
    madvise(memory, rounded, MADV_HUGEPAGE);
  }
  return static_cast<std::byte*>(memory);
}

}  // namespace

Stream::Stream(int num_threads, size_t scratch_bytes)
    : num_threads_(num_threads), scratch_bytes_((scratch_bytes + 63) / 64 * 64) {
  MOELORA_ASSERT(num_threads >= 1);
  for (int worker = 0; worker < num_threads; ++worker) {
    std::byte* memory = take_scratch(scratch_bytes_);
    if (memory == nullptr) {
      for (std::byte* taken : scratch_) {
        std::free(taken);
      }
      throw std::bad_alloc();
    }
    scratch_.push_back(memory);
  }
  threads_.reserve(static_cast<size_t>(num_threads - 1));
  try {
    for (int worker = 1; worker < num_threads; ++worker) {
      threads_.push_back(start_thread([this, worker] { worker_loop(worker); }));
    }
  } catch (...) {
    num_threads_ = static_cast<int>(threads_.size()) + 1;
    stop_.store(true);
    epoch_.fetch_add(1);
    wake_.notify_all();
    for (std::thread& thread : threads_) {
      thread.join();
    }
    for (std::byte* taken : scratch_) {
      std::free(taken);
    }
    throw;
  }
}

Stream::~Stream() {
  stop_.store(true);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    epoch_.fetch_add(1);
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) {
    thread.join();
  }
  for (std::byte* memory : scratch_) {
    std::free(memory);
  }
}

void Stream::run(Entry entry, const void* context) {
  if (num_threads_ == 1) {
    entry(context, 0);
    return;
  }
  entry_ = entry;
  context_ = context;
  remaining_.store(num_threads_ - 1, std::memory_order_relaxed);
  // seq_cst pairs with the sleeper's increment-then-check: one of the two sees the other.
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_seq_cst) > 0) {
    const std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  entry(context, 0);
  for (int spins = 0; remaining_.load(std::memory_order_acquire) != 0; ++spins) {
    if (spins < kSpins * 8) {
      pause_cpu();
    } else {
      std::this_thread::yield();
    }
  }
}

void Stream::worker_loop(int worker) {
  uint32_t seen = 0;
  for (;;) {
    int spins = 0;
    while (epoch_.load(std::memory_order_acquire) == seen) {
      if (++spins < kSpins) {
        pause_cpu();
        continue;
      }
      std::unique_lock<std::mutex> lock(mutex_);
      sleeping_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [&] { return epoch_.load(std::memory_order_seq_cst) != seen; });
      sleeping_.fetch_sub(1, std::memory_order_seq_cst);
    }
    ++seen;
    if (stop_.load()) {
      return;
    }
    entry_(context_, worker);
    remaining_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace moelora
