// SPDX-License-Identifier: Apache-2.0
#include "runtime/adapter/stream_progress.h"

#include <algorithm>

namespace moelora {

void StreamProgress::publish(uint64_t bytes) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    num_ready_ = std::max(num_ready_, bytes);
  }
  grown_.notify_all();
}

void StreamProgress::fail() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    failed_ = true;
  }
  grown_.notify_all();
}

bool StreamProgress::wait_for(uint64_t bytes, std::chrono::microseconds timeout) const {
  std::unique_lock<std::mutex> lock(mutex_);
  grown_.wait_for(lock, timeout, [&] { return failed_ || num_ready_ >= bytes; });
  return !failed_ && num_ready_ >= bytes;
}

bool StreamProgress::is_growing() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !failed_ && num_ready_ < std::numeric_limits<uint64_t>::max();
}

}  // namespace moelora
