// SPDX-License-Identifier: Apache-2.0
// Full blocks of KV, found by what they mean: the key space (which adapter, at which factor, whose salt) and all
// tokens up to the block's end. A block enters when a running sequence has filled it, holds a lease on its pages, and
// is shared at once; one that no sequence holds is idle and may leave, least recently used first. Sequences hold whole
// runs from the first block on and give them back last block first, so that a block never leaves before those that
// continue it. Hashes only find; tokens and parents are compared.
// All storage is reserved at construction; only open_space allocates. Callers hold the engine's lock.
// Invariants (audit): a block's pages have one lease of the cache and one of each sequence that holds it.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <string>

#include "runtime/memory/kv_cache.h"
#include "runtime/memory/page_pool.h"

namespace moelora {

// What KV depends on beside the tokens.
struct PrefixKey {
  uint64_t generation = 0;  // Adapter::generation; 0 = base
  uint32_t scale_bits = 0;  // of the factor that the kernels see; 0 = base
  std::string salt;         // of the host: sequences of different salts share nothing
  auto operator<=>(const PrefixKey&) const = default;
};

struct PrefixCounters {
  uint64_t queries = 0;       // sequences that started, again ones after a preemption too
  uint64_t query_tokens = 0;  // that they had to have computed
  uint64_t hit_tokens = 0;    // of them found
};

struct PrefixSpace {
  const PrefixKey* key = nullptr;
  uint64_t hash = 0;  // of the run without a block
  int32_t num_users = 0;
  int32_t num_blocks = 0;
  int32_t newest = 0;       // of its blocks, 0 = none
  bool is_dropped = false;  // nobody can ask for it again: its blocks leave once no sequence holds them
};

class PrefixCache {
 public:
  // `hash_mask` makes hashes collide in tests.
  PrefixCache(PagePool& pool, const KvGeometry& geometry, uint64_t hash_mask = ~uint64_t{0});
  ~PrefixCache();
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  // The space of `key`, until its user closes it. Allocates.
  PrefixSpace* open_space(const PrefixKey& key);
  void close_space(PrefixSpace* space);
  // Of adapters that are gone.
  void drop(uint64_t generation);

  // Lengthens the sequence by cached blocks that go on as `tokens` do, to at most `limit` tokens. Pages that it had for
  // them go back. Gives the number of tokens that need not be computed.
  int32_t adopt(KvSequence& sequence, PrefixSpace* space, const int32_t* tokens, int32_t limit);
  // Takes in the blocks that the sequence has filled. Where another sequence was first, its pages are shared instead.
  void insert(KvSequence& sequence, PrefixSpace* space, const int32_t* tokens);
  // The sequence keeps the first `num_blocks` of those that it holds.
  void release(KvSequence& sequence, int32_t num_blocks);
  // `fork` holds the first `num_blocks` of `other` too. It held none.
  void fork(KvSequence& fork, const KvSequence& other, int32_t num_blocks);

  // Frees the least recently used idle block: false if there is none.
  bool evict();
  // Time as the owner counts it, for `idle_since`.
  void set_now(uint64_t now) { now_ = now; }
  // When the block that evict() would free was last held; there must be one.
  [[nodiscard]] uint64_t idle_since() const { return block(idle_first_).last_used; }
  // Of the blocks of late, the part that was asked for again.
  [[nodiscard]] double reuse_rate() const;

  [[nodiscard]] int32_t num_blocks() const { return num_blocks_; }
  [[nodiscard]] int32_t num_idle_pages() const { return num_idle_ * groups_; }
  [[nodiscard]] size_t num_spaces() const { return spaces_.size(); }
  [[nodiscard]] uint64_t num_evictions() const { return num_evictions_; }
  PrefixCounters counters;  // of whoever adopts
  // Re-derives lists, counts and leases; throws Error{kInternal}.
  void audit() const;

 private:
  // Numbered from 1: zeroed memory is an empty cache.
  struct Block {
    uint64_t hash;
    uint64_t last_used;
    PrefixSpace* space;
    int32_t parent;  // 0 = the first of a run
    int32_t num_children;
    int32_t num_users;  // sequences that hold it
    int32_t bucket_next;
    int32_t idle_before, idle_after;
    int32_t older, newer;  // of the same space
    bool was_hit;
  };
  [[nodiscard]] Block& block(int32_t id) const { return blocks_[id]; }
  [[nodiscard]] int32_t* tokens_of(int32_t id) const { return tokens_ + int64_t{id} * block_tokens_; }
  [[nodiscard]] PageId* pages_of(int32_t id) const { return pages_ + int64_t{id} * groups_; }
  [[nodiscard]] int32_t& bucket_of(uint64_t hash) const { return buckets_[hash & bucket_mask_]; }
  [[nodiscard]] uint64_t hash_after(uint64_t hash, const int32_t* tokens) const;
  [[nodiscard]] int32_t find(const PrefixSpace* space, int32_t parent, uint64_t hash, const int32_t* tokens) const;
  int32_t add(PrefixSpace* space, int32_t parent, uint64_t hash, const int32_t* tokens, const PageId* pages);
  void hold(int32_t id);
  void make_idle(int32_t id);
  void leave_idle(int32_t id);
  void remove(int32_t id);
  void erase_if_unused(PrefixSpace* space);

  PagePool& pool_;
  int32_t block_tokens_, groups_, capacity_;
  uint64_t hash_mask_, seed_, bucket_mask_ = 0;
  void* memory_ = nullptr;
  size_t memory_bytes_ = 0;
  Block* blocks_ = nullptr;     // [capacity + 1]; the first is none
  int32_t* tokens_ = nullptr;   // [capacity + 1, block_tokens]
  PageId* pages_ = nullptr;     // [capacity + 1, groups]
  int32_t* buckets_ = nullptr;  // [bucket_mask + 1]
  std::map<PrefixKey, PrefixSpace> spaces_;
  int32_t num_blocks_ = 0, num_idle_ = 0, num_touched_ = 0, free_first_ = 0;
  int32_t idle_first_ = 0, idle_last_ = 0;  // least recently used first
  uint64_t now_ = 0, num_spaces_opened_ = 0, num_evictions_ = 0;
  uint64_t num_inserted_ = 0, num_reused_ = 0;  // of late
};

}  // namespace moelora
