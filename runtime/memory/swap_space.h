// SPDX-License-Identifier: Apache-2.0
// Host memory for KV pages of preempted sequences: places of one page each, taken at open. A swap is a chain of places,
// so that taking and giving back allocate nothing. Not thread-safe: callers hold the engine's lock; the bytes are for
// the engine thread. Page-locked on a GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/base/device.h"

namespace moelora {

// Places of one sequence, in order of its pages. Owned by who took it until given back.
struct Swap {
  int32_t first = -1;  // then SwapSpace::next
  int32_t num_pages = 0;
  int32_t num_tokens = 0;
};

class SwapSpace {
 public:
  // As many whole pages as `bytes` hold; `device` must outlive it. Throws Error{kNomem, kDeviceNomem, kCuda}.
  SwapSpace(int64_t bytes, int64_t page_bytes, Device& device);
  ~SwapSpace();
  SwapSpace(const SwapSpace&) = delete;
  SwapSpace& operator=(const SwapSpace&) = delete;

  // All or nothing.
  [[nodiscard]] bool try_take(int32_t num_pages, int32_t num_tokens, Swap* out);
  void release(Swap& swap);
  [[nodiscard]] int32_t next(int32_t place) const { return next_[static_cast<size_t>(place)]; }
  [[nodiscard]] std::byte* place(int32_t place) const { return memory_ + place * page_bytes_; }
  [[nodiscard]] int32_t num_places() const { return static_cast<int32_t>(next_.size()); }
  [[nodiscard]] int32_t num_free() const { return num_free_; }
  // Throws Error{kInternal} unless the free chain has num_free() places.
  void audit() const;

 private:
  int64_t page_bytes_;
  Device& device_;
  std::vector<int32_t> next_;  // of each place: the one behind it in its chain; -1 ends it
  int32_t first_free_ = -1;
  int32_t num_free_ = 0;
  std::byte* memory_ = nullptr;
};

}  // namespace moelora
