// SPDX-License-Identifier: Apache-2.0
#include "runtime/memory/prefix_cache.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/error.h"

namespace moelora {
namespace {

// So many blocks at least are counted before older ones lose weight in reuse_rate.
constexpr uint64_t kReuseWindowMin = 1024;
// Before anything is known: one in this many is asked for again.
constexpr uint64_t kReusePrior = 16;

uint64_t scrambled(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

}  // namespace

PrefixCache::PrefixCache(PagePool& pool, const KvGeometry& geometry, uint64_t hash_mask)
    : pool_(pool),
      block_tokens_(geometry.layout.block_tokens),
      groups_(geometry.layout.num_groups),
      capacity_(pool.num_pages() / geometry.layout.num_groups),
      hash_mask_(hash_mask) {
  // Tokens come from strangers, who must not be able to choose what collides.
  std::random_device device;
  seed_ = static_cast<uint64_t>(device()) << 32 | device();
  const auto count = static_cast<size_t>(capacity_) + 1;
  const size_t num_buckets = std::bit_ceil(count);
  bucket_mask_ = num_buckets - 1;
  const size_t tokens_at = count * sizeof(Block);
  const size_t pages_at = tokens_at + count * static_cast<size_t>(block_tokens_) * sizeof(int32_t);
  const size_t buckets_at = pages_at + count * static_cast<size_t>(groups_) * sizeof(PageId);
  memory_bytes_ = buckets_at + num_buckets * sizeof(int32_t);
  // Zeroed, and taken page by page as the cache fills: pools of small models have very many blocks.
  memory_ = mmap(nullptr, memory_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory_ == MAP_FAILED) {
    throw Error(Status::kNomem, "prefix cache: cannot take " + std::to_string(memory_bytes_) + " bytes");
  }
  auto* bytes = static_cast<std::byte*>(memory_);
  blocks_ = reinterpret_cast<Block*>(bytes);
  tokens_ = reinterpret_cast<int32_t*>(bytes + tokens_at);
  pages_ = reinterpret_cast<PageId*>(bytes + pages_at);
  buckets_ = reinterpret_cast<int32_t*>(bytes + buckets_at);
}

PrefixCache::~PrefixCache() {
  munmap(memory_, memory_bytes_);
}

PrefixSpace* PrefixCache::open_space(const PrefixKey& key) {
  const auto [at, is_new] = spaces_.try_emplace(key);
  PrefixSpace& space = at->second;
  if (is_new) {
    space.key = &at->first;
    space.hash = scrambled(seed_ + ++num_spaces_opened_);
  }
  ++space.num_users;
  return &space;
}

void PrefixCache::close_space(PrefixSpace* space) {
  MOELORA_ASSERT(space->num_users > 0);
  --space->num_users;
  erase_if_unused(space);
}

void PrefixCache::erase_if_unused(PrefixSpace* space) {
  if (space->num_users == 0 && space->num_blocks == 0) {
    spaces_.erase(spaces_.find(*space->key));
  }
}

void PrefixCache::drop(uint64_t generation) {
  auto at = spaces_.lower_bound({generation, 0, ""});
  while (at != spaces_.end() && at->first.generation == generation) {
    PrefixSpace& space = (at++)->second;
    space.is_dropped = true;
    ++space.num_users;  // stays while its blocks go
    // A block is newer than its parent.
    for (int32_t id = space.newest; id != 0;) {
      const int32_t older = block(id).older;
      if (block(id).num_users == 0) {
        leave_idle(id);
        remove(id);
      }
      id = older;
    }
    close_space(&space);
  }
}

uint64_t PrefixCache::hash_after(uint64_t hash, const int32_t* tokens) const {
  for (int32_t i = 0; i < block_tokens_; ++i) {
    hash = (hash ^ static_cast<uint32_t>(tokens[i])) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
  }
  return scrambled(hash) & hash_mask_;
}

int32_t PrefixCache::find(const PrefixSpace* space, int32_t parent, uint64_t hash, const int32_t* tokens) const {
  int32_t id = bucket_of(hash);
  while (id != 0) {
    const Block& entry = block(id);
    if (entry.hash == hash && entry.parent == parent && entry.space == space &&
        std::equal(tokens, tokens + block_tokens_, tokens_of(id))) {
      return id;
    }
    id = entry.bucket_next;
  }
  return 0;
}

int32_t PrefixCache::add(PrefixSpace* space, int32_t parent, uint64_t hash, const int32_t* tokens,
                         const PageId* pages) {
  MOELORA_ASSERT(num_blocks_ < capacity_);  // each has pages of its own
  int32_t id = free_first_;
  if (id != 0) {
    free_first_ = block(id).bucket_next;
  } else {
    id = ++num_touched_;
  }
  int32_t& bucket = bucket_of(hash);
  Block& entry = block(id);
  entry = {};
  entry.hash = hash;
  entry.space = space;
  entry.parent = parent;
  entry.bucket_next = bucket;
  bucket = id;
  entry.older = space->newest;
  block(space->newest).newer = id;
  space->newest = id;
  ++space->num_blocks;
  ++block(parent).num_children;
  std::copy_n(tokens, block_tokens_, tokens_of(id));
  std::copy_n(pages, groups_, pages_of(id));
  pool_.share(pages, groups_);
  ++num_blocks_;
  if (++num_inserted_ > std::max(kReuseWindowMin, static_cast<uint64_t>(capacity_))) {
    num_inserted_ /= 2;
    num_reused_ /= 2;
  }
  return id;
}

void PrefixCache::remove(int32_t id) {
  const Block& entry = block(id);
  MOELORA_ASSERT(entry.num_users == 0 && entry.num_children == 0);
  int32_t* at = &bucket_of(entry.hash);
  while (*at != id) {
    at = &block(*at).bucket_next;
  }
  *at = entry.bucket_next;
  PrefixSpace* space = entry.space;
  (space->newest == id ? space->newest : block(entry.newer).older) = entry.older;
  block(entry.older).newer = entry.newer;
  --space->num_blocks;
  --block(entry.parent).num_children;
  pool_.release(pages_of(id), groups_);
  block(id) = {};
  block(id).bucket_next = free_first_;
  free_first_ = id;
  --num_blocks_;
  erase_if_unused(space);
}

void PrefixCache::hold(int32_t id) {
  if (block(id).num_users++ == 0) {
    leave_idle(id);
  }
}

void PrefixCache::make_idle(int32_t id) {
  Block& entry = block(id);
  entry.last_used = now_;
  entry.idle_before = idle_last_;
  entry.idle_after = 0;
  (idle_last_ == 0 ? idle_first_ : block(idle_last_).idle_after) = id;
  idle_last_ = id;
  ++num_idle_;
}

void PrefixCache::leave_idle(int32_t id) {
  const Block& entry = block(id);
  (idle_first_ == id ? idle_first_ : block(entry.idle_before).idle_after) = entry.idle_after;
  (idle_last_ == id ? idle_last_ : block(entry.idle_after).idle_before) = entry.idle_before;
  --num_idle_;
}

int32_t PrefixCache::adopt(KvSequence& sequence, PrefixSpace* space, const int32_t* tokens, int32_t limit) {
  const int32_t length = sequence.length;
  if (sequence.num_cached != length / block_tokens_ || (sequence.num_cached > 0 && sequence.space != space)) {
    return 0;
  }
  int32_t parent = sequence.num_cached == 0 ? 0 : sequence.cached[static_cast<size_t>(sequence.num_cached) - 1];
  for (int32_t first = sequence.num_cached * block_tokens_; first + block_tokens_ <= limit; first += block_tokens_) {
    const uint64_t hash = hash_after(parent == 0 ? space->hash : block(parent).hash, tokens + first);
    const int32_t id = find(space, parent, hash, tokens + first);
    if (id == 0) {
      break;
    }
    hold(id);
    num_reused_ += block(id).was_hit ? 0 : 1;
    block(id).was_hit = true;
    sequence.pages.share_at(sequence.num_cached * groups_, pages_of(id), groups_);
    sequence.cached[static_cast<size_t>(sequence.num_cached++)] = id;
    sequence.space = space;
    sequence.length = first + block_tokens_;
    parent = id;
  }
  return sequence.length - length;
}

void PrefixCache::insert(KvSequence& sequence, PrefixSpace* space, const int32_t* tokens) {
  if (sequence.num_cached > 0 && sequence.space != space) {
    return;
  }
  while (sequence.num_cached < sequence.length / block_tokens_) {
    const int32_t parent = sequence.num_cached == 0 ? 0 : sequence.cached[static_cast<size_t>(sequence.num_cached) - 1];
    const int32_t* own = tokens + int64_t{sequence.num_cached} * block_tokens_;
    const PageId* pages = sequence.pages.data() + int64_t{sequence.num_cached} * groups_;
    const uint64_t hash = hash_after(parent == 0 ? space->hash : block(parent).hash, own);
    int32_t id = find(space, parent, hash, own);
    if (id != 0) {
      hold(id);
      sequence.pages.share_at(sequence.num_cached * groups_, pages_of(id), groups_);
    } else if (pool_.leases(pages[0]) == 1) {
      id = add(space, parent, hash, own, pages);
      block(id).num_users = 1;
    } else {
      return;  // a fork reads it that does not know the cache holds it
    }
    sequence.cached[static_cast<size_t>(sequence.num_cached++)] = id;
    sequence.space = space;
  }
}

void PrefixCache::release(KvSequence& sequence, int32_t num_blocks) {
  while (sequence.num_cached > num_blocks) {
    const int32_t id = sequence.cached[static_cast<size_t>(--sequence.num_cached)];
    Block& entry = block(id);
    MOELORA_ASSERT(entry.num_users > 0);
    if (--entry.num_users > 0) {
      continue;
    }
    if (entry.space->is_dropped) {
      remove(id);
    } else {
      make_idle(id);
    }
  }
  if (sequence.num_cached == 0) {
    sequence.space = nullptr;
  }
}

void PrefixCache::fork(KvSequence& fork, const KvSequence& other, int32_t num_blocks) {
  MOELORA_ASSERT(fork.num_cached == 0 && num_blocks <= other.num_cached);
  for (int32_t i = 0; i < num_blocks; ++i) {
    const int32_t id = other.cached[static_cast<size_t>(i)];
    hold(id);
    fork.cached[static_cast<size_t>(i)] = id;
  }
  fork.num_cached = num_blocks;
  fork.space = num_blocks > 0 ? other.space : nullptr;
}

bool PrefixCache::evict() {
  const int32_t id = idle_first_;
  if (id == 0) {
    return false;
  }
  leave_idle(id);
  remove(id);
  ++num_evictions_;
  return true;
}

double PrefixCache::reuse_rate() const {
  return static_cast<double>(num_reused_ + 1) / static_cast<double>(num_inserted_ + kReusePrior);
}

void PrefixCache::audit() const {
  std::vector<int32_t> idle_place(static_cast<size_t>(num_touched_) + 1, 0);
  int32_t num_idle = 0;
  for (int32_t id = idle_first_; id != 0; id = block(id).idle_after) {
    idle_place[static_cast<size_t>(id)] = ++num_idle;
    MOELORA_ASSERT(block(id).num_users == 0);
  }
  MOELORA_ASSERT(num_idle == num_idle_ && (num_idle == 0) == (idle_last_ == 0));
  std::vector<int32_t> children(static_cast<size_t>(num_touched_) + 1, 0);
  int32_t num_blocks = 0;
  for (const auto& [key, space] : spaces_) {
    MOELORA_ASSERT(space.num_users > 0 || space.num_blocks > 0);
    int32_t num_of_space = 0;
    for (int32_t id = space.newest; id != 0; id = block(id).older) {
      const Block& entry = block(id);
      ++num_of_space;
      ++children[static_cast<size_t>(entry.parent)];
      MOELORA_ASSERT(entry.space == &space);
      MOELORA_ASSERT((entry.num_users == 0) == (idle_place[static_cast<size_t>(id)] > 0));
      MOELORA_ASSERT(find(&space, entry.parent, entry.hash, tokens_of(id)) == id);
      if (entry.parent != 0) {  // held as long, and leaves later
        const Block& parent = block(entry.parent);
        MOELORA_ASSERT(parent.space == &space && parent.num_users >= entry.num_users);
        MOELORA_ASSERT(parent.num_users > 0 ||
                       idle_place[static_cast<size_t>(entry.parent)] > idle_place[static_cast<size_t>(id)]);
      }
      for (int32_t i = 0; i < groups_; ++i) {
        MOELORA_ASSERT(pool_.leases(pages_of(id)[i]) == 1 + entry.num_users);
      }
    }
    MOELORA_ASSERT(num_of_space == space.num_blocks);
    num_blocks += num_of_space;
  }
  MOELORA_ASSERT(num_blocks == num_blocks_);
  for (int32_t id = 1; id <= num_touched_; ++id) {
    MOELORA_ASSERT(children[static_cast<size_t>(id)] == block(id).num_children);
  }
}

}  // namespace moelora
