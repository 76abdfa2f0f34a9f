// SPDX-License-Identifier: Apache-2.0
// A KvView as kernels of one layer use it: what depends neither on sequence nor on position is worked out by the host,
// the division by block_tokens as a multiplication too.
#pragma once

#include "kernels/attention/kv_view.h"
#include "kernels/base/error.h"

namespace moelora {

struct KvLayer {
  std::byte* pool;       // K of the layer in page 0
  const int32_t* pages;  // the layer's page of block 0 of sequence 0
  int64_t page_bytes;
  int64_t sequence_step;  // entries of `pages` between sequences
  int block_step;         // and between blocks
  int block_tokens;
  uint64_t reciprocal;  // 2^32 / block_tokens, rounded up
  int elements;         // from a block's K to its V

  __device__ __forceinline__ int block_of(int position) const {
    return static_cast<int>(static_cast<uint32_t>(position) * reciprocal >> 32);
  }
  // The layer's K of a block of a sequence.
  __device__ __forceinline__ std::byte* block(int sequence, int block) const {
    return pool + pages[sequence * sequence_step + static_cast<int64_t>(block) * block_step] * page_bytes;
  }
};

inline KvLayer layer_of(const KvView& kv, int layer) {
  const KvLayout& layout = kv.layout;
  MOELORA_ASSERT(layout.block_tokens > 0 && layout.block_tokens <= 1024);  // exact for 2^22 positions and more
  return {kv.pool + layer % layout.layers_per_page * layout.layer_bytes(),
          kv.block_tables + layer / layout.layers_per_page,
          kv.page_bytes,
          static_cast<int64_t>(kv.max_blocks) * layout.num_groups,
          layout.num_groups,
          layout.block_tokens,
          ((uint64_t{1} << 32) + static_cast<uint64_t>(layout.block_tokens) - 1) /
              static_cast<uint64_t>(layout.block_tokens),
          static_cast<int>(kv.elements())};
}

}  // namespace moelora
