// SPDX-License-Identifier: Apache-2.0
#include "runtime/memory/kv_cache.h"

#include <algorithm>
#include <cmath>

#include "kernels/base/error.h"
#include "runtime/memory/prefix_cache.h"

namespace moelora {

KvGeometry choose_kv_geometry(int32_t num_layers, int32_t num_kv_heads, int32_t head_dim, int32_t block_tokens,
                              Dtype dtype) {
  KvGeometry geometry;
  KvLayout& layout = geometry.layout;
  layout.block_tokens = block_tokens;
  layout.num_kv_heads = num_kv_heads;
  layout.head_dim = head_dim;
  layout.dtype = dtype;
  geometry.num_layers = num_layers;
  const int64_t layer_bytes = layout.layer_bytes();
  constexpr double kTarget = 128 << 10;
  double best = 1e300;
  for (int32_t layers = 1; layers <= num_layers; ++layers) {
    const int64_t page = (layers * layer_bytes + 2047) / 2048 * 2048;
    const int32_t groups = (num_layers + layers - 1) / layers;
    const double waste = static_cast<double>(groups * page) / static_cast<double>(num_layers * layer_bytes) - 1.0;
    // A factor of two away from the target costs as much as 0.5 % of waste: no model of 8 layers or more wastes 2 %.
    const double cost = waste + 0.005 * std::abs(std::log2(static_cast<double>(page) / kTarget));
    if (cost < best) {
      best = cost;
      layout.layers_per_page = layers;
      layout.num_groups = groups;
      geometry.page_bytes = page;
    }
  }
  geometry.reason =
      std::to_string(layout.layers_per_page) + " of " + std::to_string(num_layers) + " layers x " +
      std::to_string(block_tokens) + " tokens x " + std::to_string(layer_bytes) + " bytes a page, " +
      std::to_string(layout.num_groups) + " pages a block, of whose bytes " +
      std::to_string(geometry.wasted_block_bytes()) +
      " stay empty: the size nearest to 131072 that wastes little, for KV in its groups of layers and for "
      "adapters in their last page";
  return geometry;
}

void KvSequence::truncate(const KvGeometry& geometry, int32_t tokens) {
  length = std::min(length, tokens);
  if (num_cached > geometry.blocks(length)) {
    prefix->release(*this, geometry.blocks(length));
  }
  pages.resize_down(std::min(pages.size(), geometry.pages(length)));
}

void KvSequence::make_tail_private(const KvGeometry& geometry, const PagePool& pool) {
  const int32_t tail = length % geometry.layout.block_tokens;
  if (tail == 0) {
    return;
  }
  const int32_t first = length / geometry.layout.block_tokens * geometry.layout.num_groups;
  if (pool.leases(pages.data()[first]) > 1) {
    truncate(geometry, length - tail);
  }
}

void KvSequence::fork_from(const KvGeometry& geometry, const KvSequence& other) {
  const int32_t full = other.length / geometry.layout.block_tokens;
  pages.share_from(other.pages, full * geometry.layout.num_groups);
  if (prefix != nullptr) {
    prefix->fork(*this, other, std::min(full, other.num_cached));
  }
  length = full * geometry.layout.block_tokens;
}

}  // namespace moelora
