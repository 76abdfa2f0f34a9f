// SPDX-License-Identifier: Apache-2.0
// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011): random bits as a
// pure function of a counter and a key. The sampler draws with it, so that a draw depends on the request's seed and
// on how many it has made, and on nothing else in the batch.
#pragma once

#include <array>
#include <cstdint>

namespace moelora {

inline std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t even = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t odd = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(odd >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(odd),
               static_cast<uint32_t>(even >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(even)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

// Uniform in [0, 1) with 53 bits: draw number `index` of the stream `seed`.
inline double philox_uniform(uint64_t seed, uint64_t index) {
  const auto bits = philox4x32({static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), 0, 0},
                               {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint64_t mantissa = (uint64_t{bits[0]} << 21) ^ (bits[1] >> 11);
  return static_cast<double>(mantissa) * 0x1p-53;
}

}  // namespace moelora
