// SPDX-License-Identifier: Apache-2.0
#include "runtime/engine/block_tables.h"

#include <algorithm>

#include "kernels/base/error.h"

namespace moelora {

BlockTables::BlockTables(int32_t num_sequences_max, int32_t width, Device& device)
    : device_(device),
      width_(width),
      tables_(device, static_cast<size_t>(num_sequences_max) * static_cast<size_t>(width) * sizeof(int32_t),
              "block tables"),
      rows_(static_cast<size_t>(num_sequences_max)) {}

void BlockTables::set(int32_t index, const PageLease& lease) {
  MOELORA_ASSERT(lease.size() <= width_);
  Row& row = rows_[static_cast<size_t>(index)];
  // A lease of one epoch only grows.
  const int32_t known = row.epoch == lease.epoch() ? row.size : 0;
  row = {lease.epoch(), lease.size()};
  if (known == lease.size()) {
    return;
  }
  std::copy(lease.data() + known, lease.data() + lease.size(), host() + int64_t{index} * width_ + known);
  const bool first = rows_from_ == rows_to_;
  rows_from_ = first ? index : std::min(rows_from_, index);
  rows_to_ = first ? index + 1 : std::max(rows_to_, index + 1);
  columns_from_ = first ? known : std::min(columns_from_, known);
  columns_to_ = first ? lease.size() : std::max(columns_to_, lease.size());
}

void BlockTables::push(Stream& stream) {
  if (rows_from_ == rows_to_) {
    return;
  }
  const size_t pitch = static_cast<size_t>(width_) * sizeof(int32_t);
  device_.push_rows(tables_.mirror(),
                    static_cast<size_t>(rows_from_) * pitch + static_cast<size_t>(columns_from_) * sizeof(int32_t),
                    pitch, static_cast<size_t>(columns_to_ - columns_from_) * sizeof(int32_t),
                    static_cast<size_t>(rows_to_ - rows_from_), stream);
  rows_from_ = rows_to_ = 0;
}

}  // namespace moelora
