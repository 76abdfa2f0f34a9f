// SPDX-License-Identifier: Apache-2.0
// 64-bit hash over words in four independent lanes: as fast as memory, where a byte-wise hash would take longer than
// the load. For telling adapters apart, not against an adversary.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moelora {

uint64_t hash_bytes(const std::byte* data, size_t bytes, uint64_t seed);

}  // namespace moelora
