// SPDX-License-Identifier: Apache-2.0
#include "runtime/adapter/content_hash.h"

#include <cstring>

namespace moelora {

uint64_t hash_bytes(const std::byte* data, size_t bytes, uint64_t seed) {
  const auto mix = [](uint64_t lane, uint64_t word) {
    lane = (lane ^ word) * 0x9ddfea08eb382d69u;
    return lane ^ (lane >> 29);
  };
  uint64_t a = seed;
  uint64_t b = mix(a, 1);
  uint64_t c = mix(b, 2);
  uint64_t d = mix(c, 3);
  const auto add = [&](const std::byte* block) {
    uint64_t words[4];
    std::memcpy(words, block, sizeof words);
    a = mix(a, words[0]);
    b = mix(b, words[1]);
    c = mix(c, words[2]);
    d = mix(d, words[3]);
  };
  size_t at = 0;
  for (; at + 32 <= bytes; at += 32) {
    add(data + at);
  }
  std::byte tail[32] = {};
  if (bytes > at) {
    std::memcpy(tail, data + at, bytes - at);
  }
  add(tail);
  return mix(mix(mix(mix(bytes, a), b), c), d);
}

}  // namespace moelora
