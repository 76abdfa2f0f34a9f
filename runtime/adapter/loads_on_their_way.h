// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace moelora {

// How many reads, or uploads, may have been begun or wait. They are looked at once a step: many small ones keep the
// loaders at work between two steps, while many large ones would hold memory long before it is written.
struct LoadsOnTheirWay {
  static constexpr size_t kMax = 32;
  static constexpr size_t kFew = 4;                        // never too many
  static constexpr uint64_t kBytes = uint64_t{256} << 20;  // of all, from which more than a few are too many

  [[nodiscard]] static bool is_full(size_t num, uint64_t bytes) {
    return num == kMax || (num >= kFew && bytes >= kBytes);
  }
};

}  // namespace moelora
