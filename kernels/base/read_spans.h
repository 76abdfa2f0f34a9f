// SPDX-License-Identifier: Apache-2.0
// Memory that a worker of the CPU will read soon and asks for while it computes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moelora {

// What is brought into L2 beside the weights of a tile: matrices that adapters multiply next. Beyond the sizes here L2
// would not keep it, and it is left out.
struct ReadSpans {
  static constexpr int32_t kMax = 256;
  static constexpr int32_t kBytesMost = 256 << 10;
  void add(const std::byte* first, int32_t bytes) {
    if (count < kMax && num_bytes + bytes <= kBytesMost) {
      spans[count++] = {first, bytes};
      num_bytes += bytes;
    }
  }
  struct Span {
    const std::byte* first;
    int32_t bytes;
  };
  Span spans[kMax];
  int32_t count = 0;
  int32_t num_bytes = 0;
};

}  // namespace moelora
