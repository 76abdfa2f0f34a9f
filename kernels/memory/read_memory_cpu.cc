// SPDX-License-Identifier: Apache-2.0
#include "kernels/memory/read_memory.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace moelora {

void read_memory_cpu(const ReadMemoryArgs& args, Stream& stream) {
  constexpr size_t kChunk = size_t{4} << 20;  // large enough that the ticket costs nothing
  std::atomic<uint64_t> total{0};
  stream.parallel_for((args.bytes + kChunk - 1) / kChunk, [&](size_t chunk, int) {
    const size_t begin = chunk * kChunk;
    const size_t count = std::min(kChunk, args.bytes - begin) / 8;
    uint64_t lanes[8] = {};
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
      const std::byte* line = args.data + begin + i * 8;
      __builtin_prefetch(line + 2048, 0, 0);
      uint64_t words[8];
      std::memcpy(words, line, sizeof words);
      for (int lane = 0; lane < 8; ++lane) {
        lanes[lane] += words[lane];
      }
    }
    uint64_t sum = 0;
    for (; i < count; ++i) {
      uint64_t word;
      std::memcpy(&word, args.data + begin + i * 8, sizeof word);
      sum += word;
    }
    for (const uint64_t lane : lanes) {
      sum += lane;
    }
    total.fetch_add(sum, std::memory_order_relaxed);
  });
  if (args.sum != nullptr) {
    *args.sum = total.load();
  }
}

}  // namespace moelora
