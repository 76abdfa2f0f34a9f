// SPDX-License-Identifier: Apache-2.0
// Where keys and values of a batch live. A block is `block_tokens` positions; a page holds one block of
// `layers_per_page` consecutive layers, so a block of a sequence takes num_groups pages, one for each
// group of layers. Inside a page, layer-major: per layer K [Nkv][block_tokens][D], then V the same.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/host_device.h"

namespace moelora {

struct KvLayout {
  int32_t block_tokens = 16;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t layers_per_page = 1;
  int32_t num_groups = 1;     // ceil(num_layers / layers_per_page)
  Dtype dtype = Dtype::kF32;  // kF32 or kBf16
  // Bytes of one layer of one block, rounded up to a granule.
  [[nodiscard]] MOELORA_HD int64_t layer_bytes() const {
    const int64_t bytes =
        int64_t{2} * num_kv_heads * block_tokens * head_dim * static_cast<int64_t>(dtype_bytes(dtype));
    return (bytes + 1023) / 1024 * 1024;
  }
};

struct KvView {
  KvLayout layout;
  std::byte* pool = nullptr;  // base of the page pool
  int64_t page_bytes = 0;
  const int32_t* block_tables = nullptr;  // [num_sequences, max_blocks, num_groups] page ids
  int32_t max_blocks = 0;

  // K of one layer of the block that holds `position` of batch sequence `sequence`; V follows at
  // + Nkv * block_tokens * D elements.
  [[nodiscard]] MOELORA_HD std::byte* block(int32_t sequence, int32_t position, int32_t layer) const {
    const int64_t entry =
        (static_cast<int64_t>(sequence) * max_blocks + position / layout.block_tokens) * layout.num_groups +
        layer / layout.layers_per_page;
    return pool + block_tables[entry] * page_bytes + (layer % layout.layers_per_page) * layout.layer_bytes();
  }
  [[nodiscard]] MOELORA_HD int64_t elements() const {
    return static_cast<int64_t>(layout.num_kv_heads) * layout.block_tokens * layout.head_dim;
  }
};

}  // namespace moelora
