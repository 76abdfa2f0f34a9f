// SPDX-License-Identifier: Apache-2.0
// A paged KV pool for op tests: sequences with block tables over pages in random order, every page NaN until written,
// and table entries beyond a sequence's blocks absurd. Element access for oracles.
#pragma once

#include <vector>

#include "kernels/attention/kv_view.h"
#include "tests/support/draw.h"
#include "tests/support/poison.h"

namespace moelora::test {

class KvFixture {
 public:
  // lengths[s]: positions that sequence s may use.
  KvFixture(const KvLayout& layout, const std::vector<int32_t>& lengths, uint32_t seed)
      : layout_(layout), pool_(0), page_bytes_(layout.layer_bytes() * layout.layers_per_page) {
    int32_t blocks = 0;
    for (const int32_t length : lengths) {
      const int32_t needed = (length + layout.block_tokens - 1) / layout.block_tokens;
      blocks += needed;
      max_blocks_ = std::max(max_blocks_, needed);
    }
    max_blocks_ += 1;
    const int32_t pages = blocks * layout.num_groups + 3;
    pool_ = PoisonedBytes(static_cast<size_t>(pages * page_bytes_));
    Draw draw(seed);
    const std::vector<int32_t> order = draw.permutation(pages);
    tables_.assign(lengths.size() * static_cast<size_t>(max_blocks_ * layout.num_groups), 0x7ffffff0);
    size_t next = 0;
    for (size_t s = 0; s < lengths.size(); ++s) {
      const int32_t needed = (lengths[s] + layout.block_tokens - 1) / layout.block_tokens;
      for (int32_t entry = 0; entry < needed * layout.num_groups; ++entry) {
        tables_[s * static_cast<size_t>(max_blocks_ * layout.num_groups) + static_cast<size_t>(entry)] = order[next++];
      }
    }
  }

  [[nodiscard]] KvView view() const { return {layout_, pool_.data(), page_bytes_, tables_.data(), max_blocks_}; }
  // Address worked out from kv_view.h's text, not with KvView::block.
  [[nodiscard]] std::byte* address(int32_t sequence, int32_t position, int32_t layer, bool value, int32_t head,
                                   int32_t dim) const {
    const int32_t block = position / layout_.block_tokens;
    const int32_t group = layer / layout_.layers_per_page;
    const int32_t page = tables_[static_cast<size_t>((sequence * max_blocks_ + block) * layout_.num_groups + group)];
    const int64_t elements = int64_t{layout_.num_kv_heads} * layout_.block_tokens * layout_.head_dim;
    const int64_t element =
        (value ? elements : 0) +
        (int64_t{head} * layout_.block_tokens + position % layout_.block_tokens) * layout_.head_dim + dim;
    return pool_.data() + page * page_bytes_ + layer % layout_.layers_per_page * layout_.layer_bytes() +
           element * static_cast<int64_t>(dtype_bytes(layout_.dtype));
  }
  [[nodiscard]] float get(int32_t sequence, int32_t position, int32_t layer, bool value, int32_t head,
                          int32_t dim) const {
    return load_element(address(sequence, position, layer, value, head, dim), layout_.dtype, 0);
  }
  void put(int32_t sequence, int32_t position, int32_t layer, bool value, int32_t head, int32_t dim, float number) {
    std::byte* at = address(sequence, position, layer, value, head, dim);
    const uint16_t half = f32_to_bf16(number);
    const void* from = layout_.dtype == Dtype::kF32 ? static_cast<const void*>(&number) : &half;
    std::memcpy(at, from, dtype_bytes(layout_.dtype));
  }
  // Draws K and V of positions [0, length) of a sequence's layer.
  void fill(int32_t sequence, int32_t length, int32_t layer, Draw& draw) {
    for (int32_t j = 0; j < length; ++j) {
      for (int32_t h = 0; h < layout_.num_kv_heads; ++h) {
        for (int32_t d = 0; d < layout_.head_dim; ++d) {
          put(sequence, j, layer, false, h, d, draw.signed_unit());
          put(sequence, j, layer, true, h, d, draw.signed_unit());
        }
      }
    }
  }
  // Elements of the pool that are not NaN.
  [[nodiscard]] int64_t written() const {
    int64_t count = 0;
    const size_t width = dtype_bytes(layout_.dtype);
    for (size_t at = 0; at < pool_.size(); at += width) {
      const float number = load_element(pool_.data() + at, layout_.dtype, 0);
      if (number == number) {
        ++count;
      }
    }
    return count;
  }
  [[nodiscard]] bool guard_intact() const { return pool_.guard_intact(); }
  // For copies to and from a device.
  [[nodiscard]] const PoisonedBytes& pool() const { return pool_; }
  [[nodiscard]] const std::vector<int32_t>& tables() const { return tables_; }

 private:
  KvLayout layout_;
  PoisonedBytes pool_;
  int64_t page_bytes_;
  int32_t max_blocks_ = 0;
  std::vector<int32_t> tables_;
};

}  // namespace moelora::test
