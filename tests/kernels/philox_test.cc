// SPDX-License-Identifier: Apache-2.0
// Philox4x32-10 against the known-answer vectors that its authors publish with Random123, and the uniform draw made of
// it.
#include "kernels/sampling/philox.h"

#include <cmath>

#include "tests/support/catch.h"

using moelora::philox4x32;
using moelora::philox_uniform;

TEST_CASE("philox4x32-10 gives the published answers") {
  using Words = std::array<uint32_t, 4>;
  CHECK(philox4x32({0, 0, 0, 0}, {0, 0}) == Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}) ==
        Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
        Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("philox_uniform takes the top 53 bits of the first two words") {
  // Counter 0, key 0: words 6627e8d5 e169c58d.
  const uint64_t words = 0x6627e8d5e169c58dull;
  CHECK(philox_uniform(0, 0) == static_cast<double>(words >> 11) * 0x1p-53);
}

TEST_CASE("philox_uniform is uniform over draws and over seeds") {
  constexpr int kCount = 20000;
  for (const bool by_seed : {false, true}) {
    double sum = 0.0;
    int bins[10] = {};
    for (uint64_t i = 0; i < kCount; ++i) {
      const double u = by_seed ? philox_uniform(i, 3) : philox_uniform(42, i + (uint64_t{1} << 40));
      REQUIRE(u >= 0.0);
      REQUIRE(u < 1.0);
      sum += u;
      ++bins[static_cast<int>(u * 10.0)];
    }
    CHECK(std::abs(sum / kCount - 0.5) <= 6.0 * std::sqrt(1.0 / 12.0 / kCount));
    for (const int bin : bins) {
      CHECK(std::abs(bin - kCount / 10) <= 6 * 43);  // sqrt(20000 * 0.1 * 0.9) = 42.4
    }
  }
}
