// SPDX-License-Identifier: Apache-2.0
// Which pages the sequences of a step have, on the device: one row for each place in the batch. Most decode steps
// change few entries or none; what a row holds is known by its lease, so that only new entries are copied and pushed.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/memory/page_pool.h"

namespace moelora {

class BlockTables {
 public:
  // `width` entries a row.
  BlockTables(int32_t num_sequences_max, int32_t width, Device& device);

  // Row `index` becomes the pages of `lease`; entries past them keep what they had.
  void set(int32_t index, const PageLease& lease);
  // Queues the copy of all that was set since the last push.
  void push(Stream& stream);

  [[nodiscard]] const int32_t* host_row(int32_t index) const { return host() + int64_t{index} * width_; }
  [[nodiscard]] const int32_t* device() const { return reinterpret_cast<const int32_t*>(tables_.device()); }

 private:
  struct Row {
    uint64_t epoch = 0;  // of the lease whose pages it holds
    int32_t size = 0;    // how many of them
  };
  [[nodiscard]] int32_t* host() const { return reinterpret_cast<int32_t*>(tables_.host()); }

  Device& device_;
  int32_t width_;
  MirrorMemory tables_;
  std::vector<Row> rows_;
  // What is to be pushed: rows and columns, from and to; empty if both are equal.
  int32_t rows_from_ = 0, rows_to_ = 0, columns_from_ = 0, columns_to_ = 0;
};

}  // namespace moelora
