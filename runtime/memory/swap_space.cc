// SPDX-License-Identifier: Apache-2.0
#include "runtime/memory/swap_space.h"

#include <limits>
#include <string>

#include "kernels/base/error.h"

namespace moelora {

SwapSpace::SwapSpace(int64_t bytes, int64_t page_bytes, Device& device) : page_bytes_(page_bytes), device_(device) {
  const int64_t places = bytes / page_bytes;
  if (places > std::numeric_limits<int32_t>::max()) {
    throw Error(Status::kInvalid, "swap_memory_bytes = " + std::to_string(bytes) + " is more than 2^31 pages of " +
                                      std::to_string(page_bytes) + " bytes");
  }
  if (places == 0) {
    return;
  }
  next_.resize(static_cast<size_t>(places));
  for (size_t place = 0; place < next_.size(); ++place) {
    next_[place] = place + 1 < next_.size() ? static_cast<int32_t>(place) + 1 : -1;
  }
  first_free_ = 0;
  num_free_ = num_places();
  memory_ = device.allocate_staging(static_cast<size_t>(places * page_bytes), "swap space (swap_memory_bytes)");
}

SwapSpace::~SwapSpace() {
  if (memory_ != nullptr) {
    device_.release_staging(memory_, next_.size() * static_cast<size_t>(page_bytes_));
  }
}

bool SwapSpace::try_take(int32_t num_pages, int32_t num_tokens, Swap* out) {
  if (num_pages <= 0 || num_pages > num_free_) {
    return false;
  }
  int32_t last = first_free_;
  for (int32_t i = 1; i < num_pages; ++i) {
    last = next(last);
  }
  *out = {first_free_, num_pages, num_tokens};
  first_free_ = next(last);
  next_[static_cast<size_t>(last)] = -1;
  num_free_ -= num_pages;
  return true;
}

void SwapSpace::release(Swap& swap) {
  if (swap.num_pages == 0) {
    return;
  }
  int32_t last = swap.first;
  while (next(last) >= 0) {
    last = next(last);
  }
  next_[static_cast<size_t>(last)] = first_free_;
  first_free_ = swap.first;
  num_free_ += swap.num_pages;
  swap = {};
}

void SwapSpace::audit() const {
  int32_t count = 0;
  for (int32_t place = first_free_; place >= 0; place = next(place)) {
    MOELORA_ASSERT(place < num_places() && ++count <= num_free_);
  }
  MOELORA_ASSERT(count == num_free_);
}

}  // namespace moelora
