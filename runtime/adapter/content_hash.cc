// SPDX-License-Identifier: Apache-2.0
#include "runtime/adapter/content_hash.h"

#include <cstring>

namespace moelora {

namespace {

// One by one: compilers spill an array of them.
uint64_t word(const std::byte* block, size_t index) {
  uint64_t value;
  std::memcpy(&value, block + index * sizeof value, sizeof value);
  return value;
}

// Both halves of a 128-bit product, one upon the other.
uint64_t fold(uint64_t x, uint64_t y) {
  const auto product = static_cast<unsigned __int128>(x) * y;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace

uint64_t hash_bytes(const std::byte* data, size_t bytes, uint64_t seed) {
  // Odd, with as many ones as zeros in no order: a word that turns its factor into 0, and so hides what came before, is
  // one of 2^64.
  constexpr uint64_t kKeys[4] = {0xa0761d6478bd642f, 0xe7037ed1a0b428db, 0x8ebc6af09c88c6e3, 0x589965cc75374cc3};
  uint64_t a = fold(seed ^ kKeys[0], kKeys[3]);
  uint64_t b = fold(seed ^ kKeys[1], kKeys[3]);
  uint64_t c = fold(seed ^ kKeys[2], kKeys[3]);
  uint64_t d = fold(seed ^ kKeys[3], kKeys[1]);
  const auto add = [&](const std::byte* block) {
    a = fold(word(block, 0) ^ a, word(block, 1) ^ kKeys[0]);
    b = fold(word(block, 2) ^ b, word(block, 3) ^ kKeys[1]);
    c = fold(word(block, 4) ^ c, word(block, 5) ^ kKeys[2]);
    d = fold(word(block, 6) ^ d, word(block, 7) ^ kKeys[3]);
  };
  size_t at = 0;
  for (; at + 64 <= bytes; at += 64) {
    add(data + at);
  }
  std::byte tail[64] = {};
  if (bytes > at) {
    std::memcpy(tail, data + at, bytes - at);
  }
  add(tail);
  const uint64_t all = fold(a ^ kKeys[1], b ^ kKeys[2]) ^ fold(c ^ kKeys[2], d ^ kKeys[3]);
  return fold(all ^ bytes, kKeys[0]);
}

}  // namespace moelora
