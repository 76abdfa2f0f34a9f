// SPDX-License-Identifier: Apache-2.0
// KV of sequences in pool pages: the geometry chosen at open, and the pages of one sequence. A block is 16 tokens of
// all layers; it takes num_groups pages. Only a block with a single lease is written, so a fork shares full blocks
// and computes its unfilled tail again. Full blocks may be in the prefix cache, which then has a lease on them too.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/attention/kv_view.h"
#include "runtime/memory/page_pool.h"

namespace moelora {

struct KvGeometry {
  KvLayout layout;
  int32_t num_layers = 0;
  int64_t page_bytes = 0;
  std::string reason;  // why this page size, in words
  [[nodiscard]] int32_t blocks(int64_t tokens) const {
    return static_cast<int32_t>((tokens + layout.block_tokens - 1) / layout.block_tokens);
  }
  [[nodiscard]] int32_t pages(int64_t tokens) const { return blocks(tokens) * layout.num_groups; }
  // Keys and values of one token, all layers.
  [[nodiscard]] int64_t token_bytes() const {
    return int64_t{2} * num_layers * layout.num_kv_heads * layout.head_dim *
           static_cast<int64_t>(dtype_bytes(layout.dtype));
  }
  // Bytes that a block's pages have beyond the keys and values of its tokens.
  [[nodiscard]] int64_t wasted_block_bytes() const {
    return layout.num_groups * page_bytes - layout.block_tokens * token_bytes();
  }
};

// Pages of G whole layers of a block, so that no page mixes blocks: G divides the layers with little waste and brings
// the page near to 128 KiB. Adapters waste half a page each; smaller pages make longer tables and shorter copies. An
// even number of granules (adapter_layout.h).
KvGeometry choose_kv_geometry(int32_t num_layers, int32_t num_kv_heads, int32_t head_dim, int32_t block_tokens,
                              Dtype dtype);

class PrefixCache;
struct PrefixSpace;

// The KV of one sequence or session. `length` tokens are computed and stored.
struct KvSequence {
  PageLease pages;  // [blocks, num_groups]
  int32_t length = 0;
  // The leading blocks that the prefix cache holds too, as PrefixCache numbers them, all of `space`.
  PrefixCache* prefix = nullptr;  // null: none
  PrefixSpace* space = nullptr;   // null while there are none
  std::vector<int32_t> cached;
  int32_t num_cached = 0;

  KvSequence(PagePool& pool, const KvGeometry& geometry, int64_t tokens_max, PrefixCache* prefix_cache = nullptr)
      : pages(pool, PageUse::kKv, geometry.pages(tokens_max)),
        prefix(prefix_cache),
        cached(prefix_cache == nullptr ? 0 : static_cast<size_t>(geometry.blocks(tokens_max))) {}
  // Room for `tokens` in all; false = the pool is short and nothing changed.
  [[nodiscard]] bool try_extend(const KvGeometry& geometry, int64_t tokens) {
    const int32_t need = geometry.pages(tokens) - pages.size();
    return need <= 0 || pages.try_grow(need);
  }
  // Keeps the first `tokens`; pages past them go back.
  void truncate(const KvGeometry& geometry, int32_t tokens);
  // Before writing at `length`: gives up the last block if it is partly filled and shared (it is computed again).
  void make_tail_private(const KvGeometry& geometry, const PagePool& pool);
  // Second lease on the full blocks of `other`.
  void fork_from(const KvGeometry& geometry, const KvSequence& other);
};

}  // namespace moelora
