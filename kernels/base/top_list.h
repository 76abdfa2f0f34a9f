// SPDX-License-Identifier: Apache-2.0
// The n best of a scan, kept sorted in the caller's arrays. Offered values come in order of rising id, so that an equal
// value stays behind the one already held: ties go to the lower id. One comparison for most offers.
#pragma once

#include <cstdint>

namespace moelora {

class TopList {
 public:
  TopList(int32_t capacity, float* values, int32_t* ids) : values_(values), ids_(ids), capacity_(capacity) {}

  void offer(float value, int32_t id) {
    if (count_ == capacity_ && (count_ == 0 || !(value > values_[count_ - 1]))) {
      return;
    }
    int32_t at = count_ < capacity_ ? count_++ : count_ - 1;
    for (; at > 0 && value > values_[at - 1]; --at) {
      values_[at] = values_[at - 1];
      ids_[at] = ids_[at - 1];
    }
    values_[at] = value;
    ids_[at] = id;
  }
  [[nodiscard]] int32_t count() const { return count_; }

 private:
  float* values_;
  int32_t* ids_;
  int32_t capacity_;
  int32_t count_ = 0;
};

}  // namespace moelora
