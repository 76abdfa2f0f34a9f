// SPDX-License-Identifier: Apache-2.0
#include "runtime/adapter/adapter_reader.h"

#include <algorithm>
#include <utility>

#include "kernels/base/thread.h"

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
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    AdapterRead& read = ring_[num_added_ % kMaxReads];
    read.image = std::move(image);
    read.status = Status::kOk;
    cancelled_[num_added_ % kMaxReads] = false;
    ++num_added_;
  }
  work_.notify_all();
}

bool AdapterReader::is_working() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_done_ < num_added_;
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

void AdapterReader::discard(std::shared_ptr<const AdapterImage> copy) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    discarded_.push_back(std::move(copy));
  }
  work_.notify_all();
}

void AdapterReader::reserve(size_t num_copies) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (num_copies > num_reserved_) {
    num_reserved_ = std::max(num_copies, 2 * num_reserved_);
    discarded_.reserve(num_reserved_);
  }
}

void AdapterReader::free_discarded(std::unique_lock<std::mutex>& lock) {
  if (discarded_.empty()) {
    return;
  }
  freeing_.reserve(num_reserved_);  // it is the next to be filled
  std::swap(freeing_, discarded_);
  lock.unlock();
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
    lock.lock();
    ++num_done_;
    lock.unlock();
    if (wake_) {
      wake_();
    }
    lock.lock();
  }
}

void AdapterReader::read(AdapterRead& read) {
  const auto begun = std::chrono::steady_clock::now();
  try {
    read.loaded = reload_adapter(*read.image, *config_);
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
  if (bytes_per_second_ > 0) {
    const std::chrono::duration<double> share(static_cast<double>(read.image->stream_bytes) /
                                              static_cast<double>(bytes_per_second_));
    next_read_ = begun + std::chrono::duration_cast<std::chrono::nanoseconds>(share);
  }
}

}  // namespace moelora
