// SPDX-License-Identifier: Apache-2.0
// The prefix cache by itself: what is found, who holds it, in which order it leaves.
#include "runtime/memory/prefix_cache.h"

#include <algorithm>
#include <vector>

#include "tests/memory/prefix_cache_support.h"

namespace moelora::test {
namespace {

Tokens counting(int32_t count, int32_t from = 0) {
  Tokens tokens(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) {
    tokens[static_cast<size_t>(i)] = from + i;
  }
  return tokens;
}

}  // namespace

TEST_CASE("full blocks are found by space, tokens and all before them", "[prefix_cache]") {
  for (const uint64_t mask : {~uint64_t{0}, uint64_t{0}}) {  // the second makes all hashes equal
    Cache cache(16, mask);
    REQUIRE(cache.groups > 1);
    PrefixSpace* base = cache.prefix.open_space({});
    PrefixSpace* salted = cache.prefix.open_space({0, 0, "tenant"});
    PrefixSpace* adapter = cache.prefix.open_space({7, 0x3f800000, ""});
    PrefixSpace* other_scale = cache.prefix.open_space({7, 0x3f000000, ""});
    PrefixSpace* reloaded = cache.prefix.open_space({8, 0x3f800000, ""});
    CHECK(cache.prefix.open_space({7, 0x3f800000, ""}) == adapter);

    KvSequence first = cache.sequence();
    cache.fill(first, adapter, counting(11));
    CHECK(cache.prefix.num_blocks() == 2);  // the third is not full
    cache.audit();
    CHECK(cache.found(adapter, counting(11)) == 8);  // while the first still runs
    CHECK(cache.found(adapter, counting(8), 7) == 4);
    CHECK(cache.found(adapter, counting(3)) == 0);
    for (PrefixSpace* space : {base, salted, other_scale, reloaded}) {
      CHECK(cache.found(space, counting(11)) == 0);
    }
    Tokens changed = counting(11);
    changed[7] = 99;
    CHECK(cache.found(adapter, changed) == 4);
    changed[0] = 99;
    CHECK(cache.found(adapter, changed) == 0);
    // The tokens of the second block are not found as a first one.
    CHECK(cache.found(adapter, counting(7, 4)) == 0);

    const int32_t used = cache.pool.num_used(PageUse::kKv);
    first.truncate(cache.geometry, 0);
    cache.audit();
    CHECK(cache.pool.num_used(PageUse::kKv) == used - cache.groups);
    CHECK(cache.prefix.num_idle_pages() == 2 * cache.groups);
    KvSequence second = cache.sequence();
    CHECK(cache.prefix.adopt(second, adapter, counting(11).data(), 10) == 8);
    CHECK(cache.prefix.num_idle_pages() == 0);
    CHECK(second.pages.size() == 2 * cache.groups);
    cache.audit();
    second.truncate(cache.geometry, 0);
  }
}

TEST_CASE("idle blocks leave least recently used first, and never before what continues them", "[prefix_cache]") {
  Cache cache(16);
  PrefixSpace* space = cache.prefix.open_space({});
  KvSequence a = cache.sequence();
  KvSequence b = cache.sequence();
  cache.fill(a, space, counting(12));
  Tokens branch = counting(12);
  branch[8] = 99;  // shares two blocks with a
  cache.prefix.adopt(b, space, branch.data(), 11);
  cache.fill(b, space, branch);
  CHECK(cache.prefix.num_blocks() == 4);
  CHECK(!cache.prefix.evict());
  a.truncate(cache.geometry, 0);
  CHECK(cache.prefix.num_idle_pages() == cache.groups);  // a's last
  b.truncate(cache.geometry, 0);
  CHECK(cache.found(space, counting(12)) == 12);  // used again: b's last is the oldest now
  const int32_t free = cache.pool.num_free();
  REQUIRE(cache.prefix.evict());
  CHECK(cache.pool.num_free() == free + cache.groups);
  cache.audit();
  CHECK(cache.found(space, branch) == 8);
  CHECK(cache.found(space, counting(12)) == 12);
  for (const int32_t left : {8, 4, 0}) {
    REQUIRE(cache.prefix.evict());
    cache.audit();
    CHECK(cache.found(space, counting(12)) == left);
  }
  CHECK(!cache.prefix.evict());
  CHECK(cache.pool.num_free() == cache.pool.num_pages());
  CHECK(cache.prefix.num_evictions() == 4);
}

TEST_CASE("who computes a block that is there already shares it", "[prefix_cache]") {
  Cache cache(16);
  PrefixSpace* space = cache.prefix.open_space({});
  KvSequence a = cache.sequence();
  KvSequence b = cache.sequence();
  cache.fill(a, space, counting(10));
  cache.fill(b, space, counting(10));  // started in the same step
  cache.audit();
  CHECK(cache.prefix.num_blocks() == 2);
  CHECK(cache.pool.num_used(PageUse::kKv) == 4 * cache.groups);  // two shared, and a tail of each
  CHECK(std::equal(a.pages.data(), a.pages.data() + 2 * cache.groups, b.pages.data()));
  CHECK(a.pages.data()[2 * cache.groups] != b.pages.data()[2 * cache.groups]);
  // One that was slower takes over in the middle of a block.
  KvSequence c = cache.sequence();
  REQUIRE(c.try_extend(cache.geometry, 16));
  c.length = 3;
  const uint64_t epoch = c.pages.epoch();
  CHECK(cache.prefix.adopt(c, space, counting(16).data(), 15) == 5);
  CHECK(c.length == 8);
  CHECK(c.pages.size() == 4 * cache.groups);
  CHECK(c.pages.epoch() != epoch);  // or a block table would keep its old pages
  cache.audit();
  for (KvSequence* sequence : {&a, &b, &c}) {
    sequence->truncate(cache.geometry, 0);
    cache.audit();
  }
  CHECK(cache.prefix.num_idle_pages() == cache.pool.num_used(PageUse::kKv));
}

TEST_CASE("a sequence that goes back does not write to cached blocks", "[prefix_cache]") {
  Cache cache(16);
  PrefixSpace* space = cache.prefix.open_space({});
  KvSequence a = cache.sequence();
  cache.fill(a, space, counting(10));
  a.truncate(cache.geometry, 6);  // into the second block
  cache.audit();
  CHECK(a.length == 6);
  a.make_tail_private(cache.geometry, cache.pool);
  CHECK(a.length == 4);
  cache.audit();
  Tokens changed = counting(10);
  changed[6] = 99;
  cache.fill(a, space, changed);
  cache.audit();
  CHECK(cache.found(space, counting(10)) == 8);
  CHECK(cache.found(space, changed) == 8);
  // What a fork holds without the cache's knowledge never enters: it would not count as held.
  KvSequence plain(cache.pool, cache.geometry, 64, &cache.prefix);
  const Tokens fresh = counting(8, 50);
  REQUIRE(plain.try_extend(cache.geometry, 8));
  plain.length = 8;
  KvSequence fork = cache.sequence();
  fork.fork_from(cache.geometry, plain);
  cache.prefix.insert(plain, space, fresh.data());
  cache.audit();
  CHECK(cache.found(space, fresh) == 0);
  fork.truncate(cache.geometry, 0);
  cache.prefix.insert(plain, space, fresh.data());
  CHECK(cache.found(space, fresh) == 8);
  a.truncate(cache.geometry, 0);
  plain.truncate(cache.geometry, 0);
  cache.audit();
}

TEST_CASE("blocks of an adapter that is gone leave with their last sequence", "[prefix_cache]") {
  Cache cache(32);
  std::vector<PrefixSpace*> spaces;
  for (const PrefixKey& key : {PrefixKey{5, 1, ""}, PrefixKey{5, 1, "x"}, PrefixKey{5, 2, ""}, PrefixKey{6, 1, ""}}) {
    spaces.push_back(cache.prefix.open_space(key));
    KvSequence sequence = cache.sequence();
    cache.fill(sequence, spaces.back(), counting(9));
    sequence.truncate(cache.geometry, 0);
  }
  KvSequence held = cache.sequence();
  REQUIRE(cache.prefix.adopt(held, spaces[0], counting(9).data(), 8) == 8);
  for (PrefixSpace* space : spaces) {
    cache.prefix.close_space(space);
  }
  CHECK(cache.prefix.num_blocks() == 8);
  CHECK(cache.prefix.num_spaces() == 4);
  cache.prefix.drop(5);
  cache.audit();
  CHECK(cache.prefix.num_blocks() == 4);  // what is held, and the other adapter's
  CHECK(cache.prefix.num_spaces() == 2);
  held.truncate(cache.geometry, 0);
  cache.audit();
  CHECK(cache.prefix.num_blocks() == 2);
  CHECK(cache.prefix.num_spaces() == 1);
  CHECK(cache.prefix.num_evictions() == 0);
  REQUIRE((cache.prefix.evict() && cache.prefix.evict()));
  CHECK(cache.prefix.num_spaces() == 0);
  CHECK(cache.pool.num_free() == cache.pool.num_pages());
}

TEST_CASE("the reuse rate follows what happens", "[prefix_cache]") {
  Cache cache(64);
  PrefixSpace* space = cache.prefix.open_space({});
  const auto run = [&](int32_t from) {
    KvSequence sequence = cache.sequence();
    const Tokens tokens = counting(16, from);
    cache.prefix.adopt(sequence, space, tokens.data(), 15);
    while (!sequence.try_extend(cache.geometry, 16)) {
      REQUIRE(cache.prefix.evict());
    }
    cache.fill(sequence, space, tokens);
    sequence.truncate(cache.geometry, 0);
  };
  const double unknown = cache.prefix.reuse_rate();
  for (int32_t i = 0; i < 200; ++i) {
    run(100 * i);
  }
  CHECK(cache.prefix.reuse_rate() < unknown / 10);
  for (int32_t i = 200; i < 1000; ++i) {
    run(100 * i);
    run(100 * i);
  }
  CHECK(cache.prefix.reuse_rate() > 0.5);
}

}  // namespace moelora::test
