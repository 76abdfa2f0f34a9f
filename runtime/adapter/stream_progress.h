// SPDX-License-Identifier: Apache-2.0
// How much of an image's stream is there, counted from its first byte, while one thread makes it and another copies
// what is there already.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <limits>
#include <mutex>

namespace moelora {

class StreamProgress {
 public:
  // Until it is called all is there. Before any other thread knows of the stream.
  void begin() { num_ready_ = 0; }
  // Grows; a smaller number changes nothing.
  void publish(uint64_t bytes);
  // All is there and checked.
  void finish() { publish(std::numeric_limits<uint64_t>::max()); }
  // It will never be whole.
  void fail();

  // Waits up to `timeout` until the first `bytes` are there or never will be; false if they are not.
  [[nodiscard]] bool wait_for(uint64_t bytes, std::chrono::microseconds timeout) const;
  // Neither whole nor failed.
  [[nodiscard]] bool is_growing() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable grown_;
  uint64_t num_ready_ = std::numeric_limits<uint64_t>::max();  // under the lock
  bool failed_ = false;                                        // under the lock
};

}  // namespace moelora
