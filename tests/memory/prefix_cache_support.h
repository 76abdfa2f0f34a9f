// SPDX-License-Identifier: Apache-2.0
// A pool of blocks of four tokens and a prefix cache over it.
#pragma once

#include <algorithm>
#include <vector>

#include "runtime/memory/prefix_cache.h"
#include "tests/support/catch.h"

namespace moelora::test {

using Tokens = std::vector<int32_t>;

constexpr int32_t kBlock = 4;

struct Cache {
  explicit Cache(int32_t num_blocks, uint64_t hash_mask = ~uint64_t{0})
      : geometry(choose_kv_geometry(12, 8, 128, kBlock, Dtype::kF32)),
        groups(geometry.layout.num_groups),
        device(open_device_cpu()),
        pool(num_blocks * groups, geometry.page_bytes, *device),
        prefix(pool, geometry, hash_mask) {}

  [[nodiscard]] KvSequence sequence() { return {pool, geometry, 64, &prefix}; }
  // Computes all of `tokens`, as steps would.
  void fill(KvSequence& sequence, PrefixSpace* space, const Tokens& tokens) {
    REQUIRE(sequence.try_extend(geometry, static_cast<int64_t>(tokens.size())));
    sequence.length = static_cast<int32_t>(tokens.size());
    prefix.insert(sequence, space, tokens.data());
  }
  // How many tokens of a sequence that comes now are there.
  int32_t found(PrefixSpace* space, const Tokens& tokens, int32_t limit = 64) {
    KvSequence probe = sequence();
    const int32_t count =
        prefix.adopt(probe, space, tokens.data(), std::min(limit, static_cast<int32_t>(tokens.size())));
    CHECK(probe.length == count);
    probe.truncate(geometry, 0);
    return count;
  }
  void audit() const {
    pool.audit();
    prefix.audit();
  }

  KvGeometry geometry;
  int32_t groups;
  std::unique_ptr<Device> device;
  PagePool pool;
  PrefixCache prefix;
};

}  // namespace moelora::test
