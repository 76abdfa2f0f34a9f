// SPDX-License-Identifier: Apache-2.0
// A KvView as kernels of one layer use it: what depends neither on sequence nor on position is worked out by the host,
// and blocks of 2^n tokens need no division.
#pragma once

#include "kernels/attention/kv_view.h"

namespace moelora {

struct KvLayer {
  std::byte* pool;       // K of the layer in page 0
  const int32_t* pages;  // the layer's page of block 0 of sequence 0
  int64_t page_bytes;
  int64_t sequence_step;  // entries of `pages` between sequences
  int block_step;         // and between blocks
  int block_tokens;
  int block_shift;  // log2(block_tokens), or -1
  int elements;     // from a block's K to its V

  __device__ __forceinline__ int block_of(int position) const {
    return block_shift >= 0 ? position >> block_shift : position / block_tokens;
  }
  // The layer's K of a block of a sequence.
  __device__ __forceinline__ std::byte* block(int sequence, int block) const {
    return pool + pages[sequence * sequence_step + static_cast<int64_t>(block) * block_step] * page_bytes;
  }
};

inline KvLayer layer_of(const KvView& kv, int layer) {
  const KvLayout& layout = kv.layout;
  int shift = 0;
  while ((1 << shift) < layout.block_tokens) {
    ++shift;
  }
  return {kv.pool + layer % layout.layers_per_page * layout.layer_bytes(),
          kv.block_tables + layer / layout.layers_per_page,
          kv.page_bytes,
          static_cast<int64_t>(kv.max_blocks) * layout.num_groups,
          layout.num_groups,
          layout.block_tokens,
          1 << shift == layout.block_tokens ? shift : -1,
          static_cast<int>(kv.elements())};
}

}  // namespace moelora
