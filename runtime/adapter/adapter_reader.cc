// SPDX-License-Identifier: Apache-2.0
#include "runtime/adapter/adapter_reader.h"

#include <algorithm>
#include <utility>

#include "kernels/base/thread.h"
#include "runtime/adapter/load_cache.h"

namespace moelora {

AdapterReader::AdapterReader(const ModelConfig* config, std::function<void()> wake, int64_t bytes_per_second)
    : config_(config),
      wake_(std::move(wake)),
      bytes_per_second_(bytes_per_second),
      thread_(start_thread([this] { run(); })) {}

void AdapterReader::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void AdapterReader::add(std::shared_ptr<TieredImage> image) {
  MOELORA_ASSERT(!is_full() && image->is_reloadable() && config_ != nullptr);
  num_bytes_ += image->stream_bytes;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    AdapterRead& read = ring_[num_added_ % kMaxReads];
    read.image = std::move(image);
    read.status = Status::kOk;
    read.growing.reset();
    cancelled_[num_added_ % kMaxReads] = false;
    ++num_added_;
  }
  work_.notify_all();
}

bool AdapterReader::is_working() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_done_ < num_added_ || is_telling_;
}

void AdapterReader::show_growing() {
  if (is_empty()) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (num_done_ < num_begun_) {
    const AdapterRead& read = ring_[num_done_ % kMaxReads];
    read.image->growing = read.growing;
  }
}

bool AdapterReader::take(AdapterRead* out) {
  if (num_taken_ == num_added_) {
    return false;
  }
  AdapterRead done;  // the ring keeps no image alive
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (num_taken_ == num_done_) {
      return false;
    }
    done = std::move(ring_[num_taken_++ % kMaxReads]);
  }
  num_bytes_ -= done.image->stream_bytes;
  *out = std::move(done);
  return true;
}

void AdapterReader::cancel(const TieredImage& image) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (uint64_t i = num_begun_; i < num_added_; ++i) {
      cancelled_[i % kMaxReads] = cancelled_[i % kMaxReads] || ring_[i % kMaxReads].image.get() == &image;
    }
  }
  work_.notify_all();
}

void AdapterReader::discard(std::shared_ptr<const AdapterImage> copy, std::shared_ptr<LoadCache> cache, Keep keep) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    discarded_.push_back({std::move(copy), std::move(cache), keep});
  }
  work_.notify_all();
}

void AdapterReader::reserve(size_t num_calls) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (num_calls > num_reserved_) {
    num_reserved_ = std::max(num_calls, 2 * num_reserved_);
    discarded_.reserve(num_reserved_);
  }
}

void AdapterReader::free(Discarded& discarded) {
  if (discarded.cache == nullptr) {
    return;
  }
  if (discarded.keep == Keep::kNothing) {
    discarded.cache->clear();
  } else if (discarded.keep == Keep::kPlans) {
    discarded.cache->free_memory();
  } else if (discarded.copy.use_count() == 1) {  // its last owner may do what it likes with it
    discarded.cache->keep_memory(std::move(std::const_pointer_cast<AdapterImage>(discarded.copy)->stream),
                                 bytes_awaited());
  }
}

// They have their bytes of the budget: memory that is kept for them does not come on top.
uint64_t AdapterReader::bytes_awaited() {
  const std::lock_guard<std::mutex> lock(mutex_);
  uint64_t bytes = 0;
  for (uint64_t i = num_begun_; i < num_added_; ++i) {
    bytes += ring_[i % kMaxReads].image->stream_bytes;
  }
  return bytes;
}

void AdapterReader::free_discarded(std::unique_lock<std::mutex>& lock) {
  if (discarded_.empty()) {
    return;
  }
  freeing_.reserve(num_reserved_);  // it is the next to be filled
  std::swap(freeing_, discarded_);
  lock.unlock();
  for (Discarded& discarded : freeing_) {
    free(discarded);
  }
  freeing_.clear();
  lock.lock();
}

bool AdapterReader::is_due() const {
  return num_done_ < num_added_ && (bytes_per_second_ == 0 || cancelled_[num_done_ % kMaxReads] ||
                                    std::chrono::steady_clock::now() >= next_read_);
}

void AdapterReader::wait_for_work(std::unique_lock<std::mutex>& lock) {
  const auto is_woken = [&] { return stopping_ || !discarded_.empty(); };
  if (num_done_ == num_added_) {
    work_.wait(lock, [&] { return is_woken() || num_done_ < num_added_; });
  } else if (!is_due()) {
    work_.wait_until(lock, next_read_, [&] { return is_woken() || is_due(); });
  }
}

void AdapterReader::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wait_for_work(lock);
    free_discarded(lock);
    if (stopping_) {
      return;
    }
    if (!is_due()) {
      continue;
    }
    AdapterRead& next = ring_[num_done_ % kMaxReads];
    const bool is_cancelled = cancelled_[num_begun_++ % kMaxReads];
    lock.unlock();
    if (is_cancelled) {
      next.status = Status::kCancelled;
    } else {
      read(next);
    }
    end(next);
    if (wake_) {
      wake_();
    }
    lock.lock();
  }
}

void AdapterReader::end(AdapterRead& read) {
  std::shared_ptr<AdapterImage> growing;  // if it failed, it may be freed here, without the lock
  std::unique_lock<std::mutex> lock(mutex_);
  growing = std::move(read.growing);
  const bool is_whole = read.status == Status::kOk;
  ++num_done_;  // from here on the caller may take it
  is_telling_ = true;
  lock.unlock();
  // Only now: whoever has copied all of it finds the read ended.
  if (growing != nullptr && is_whole) {
    growing->progress.finish();
  } else if (growing != nullptr) {
    growing->progress.fail();
  }
  growing.reset();
  lock.lock();
  is_telling_ = false;
}

void AdapterReader::read(AdapterRead& read) {
  const auto begun = std::chrono::steady_clock::now();
  try {
    read.loaded = reload_adapter(*read.image, *config_, [&](const std::shared_ptr<AdapterImage>& growing) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        read.growing = growing;
      }
      if (wake_) {
        wake_();
      }
    });
  } catch (const Error& error) {
    read.status = error.status();
    read.message = error.what();
  } catch (const std::bad_alloc&) {
    read.status = Status::kNomem;
    read.message = "no host memory for " + std::to_string(read.image->stream_bytes) + " bytes";
  } catch (const std::exception& error) {
    read.status = Status::kInternal;
    read.message = error.what();
  }
  if (const std::shared_ptr<LoadCache>& cache = read.image->options.cache; cache != nullptr) {
    cache->bound_memory(bytes_awaited());
  }
  if (bytes_per_second_ > 0) {
    const std::chrono::duration<double> share(static_cast<double>(read.image->stream_bytes) /
                                              static_cast<double>(bytes_per_second_));
    next_read_ = begun + std::chrono::duration_cast<std::chrono::nanoseconds>(share);
  }
}

}  // namespace moelora
