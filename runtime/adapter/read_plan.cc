// SPDX-License-Identifier: Apache-2.0
#include "runtime/adapter/read_plan.h"

#include <algorithm>
#include <tuple>

namespace moelora {
namespace {

// Half of a core's cache; a read of it costs much more than the call.
constexpr uint64_t kUnitBytes = uint64_t{512} << 10;

struct Extent {
  uint64_t begin = 0, end = 0;
  void add(const Extent& other) {
    begin = std::min(begin, other.begin);
    end = std::max(end, other.end);
  }
  [[nodiscard]] uint64_t bytes() const { return end - begin; }
};

int32_t num_blocks(const TiledMatrix& matrix) {
  return ceil_div(matrix.view.columns, kTileColumns);
}

Extent extent_of(const TiledMatrix& matrix, int32_t first_block, int32_t end_block) {
  const MatrixView& view = matrix.view;
  const int64_t last_column = std::min(end_block * kTileColumns, view.columns) - 1;
  const int64_t last = view.offset + (matrix.rank - 1) * view.rank_stride + last_column * view.column_stride;
  return {block_offset(matrix, first_block),
          view.tensor->offset + static_cast<uint64_t>(last + 1) * dtype_bytes(matrix.stored)};
}

// Blocks of columns lie one after the other in the file, not beside each other.
bool has_rows_of_ranks(const TiledMatrix& matrix) {
  return matrix.view.column_stride > (matrix.rank - 1) * matrix.view.rank_stride;
}

// What of a matrix is looked at to find those that are interleaved with it.
Extent head_of(const TiledMatrix& matrix) {
  return extent_of(matrix, 0, has_rows_of_ranks(matrix) ? 1 : num_blocks(matrix));
}

bool belong_together(const TiledMatrix& first, const Extent& heads, const TiledMatrix& next) {
  return next.view.tensor == first.view.tensor && next.view.column_stride == first.view.column_stride &&
         has_rows_of_ranks(next) == has_rows_of_ranks(first) && head_of(next).begin < heads.end;
}

void append_parts(ReadPlan& plan, size_t begin, size_t end) {
  ReadPart part;
  part.begin = begin;
  part.end = end;
  part.granule = plan.matrices[begin].granule;
  int32_t blocks = 0;
  for (size_t i = begin; i < end; ++i) {
    part.granule = std::min(part.granule, plan.matrices[i].granule);
    blocks = std::max(blocks, num_blocks(plan.matrices[i].matrix));
  }
  const auto extent = [&](int32_t first_block, int32_t end_block) {
    Extent whole{UINT64_MAX, 0};
    for (size_t i = begin; i < end; ++i) {
      const TiledMatrix& matrix = plan.matrices[i].matrix;
      if (first_block < num_blocks(matrix)) {
        whole.add(extent_of(matrix, first_block, std::min(end_block, num_blocks(matrix))));
      }
    }
    return whole;
  };
  const bool divisible = has_rows_of_ranks(plan.matrices[begin].matrix);
  const bool is_small = extent(0, blocks).bytes() <= kUnitBytes;
  for (int32_t block = 0; block < blocks;) {
    int32_t end_block = divisible && !is_small ? block + 1 : blocks;
    Extent range = extent(block, end_block);
    while (end_block < blocks) {
      const Extent longer = extent(block, end_block + 1);
      if (longer.bytes() > kUnitBytes) {
        break;
      }
      range = longer;
      ++end_block;
    }
    part.first_block = block;
    part.end_block = end_block;
    part.offset = range.begin;
    part.end_offset = range.end;
    plan.parts.push_back(part);
    block = end_block;
  }
}

void append_units(ReadPlan& plan) {
  for (size_t i = 0; i < plan.parts.size(); ++i) {
    const ReadPart& part = plan.parts[i];
    if (i == 0 || plan.units.back().end_offset != part.offset ||
        part.end_offset - plan.units.back().offset > kUnitBytes) {
      plan.units.push_back({i, i, part.offset, part.offset, part.granule});
    }
    ReadUnit& unit = plan.units.back();
    unit.end = i + 1;
    unit.end_offset = part.end_offset;
    plan.largest_unit = std::max(plan.largest_unit, unit.bytes());
  }
}

}  // namespace

uint64_t block_offset(const TiledMatrix& matrix, int32_t block) {
  const MatrixView& view = matrix.view;
  return view.tensor->offset + static_cast<uint64_t>(view.offset + int64_t{block} * kTileColumns * view.column_stride) *
                                   dtype_bytes(matrix.stored);
}

ReadPlan plan_reads(std::vector<MatrixPlace> matrices) {
  // The keys are made once: a file may have tens of thousands of matrices.
  std::vector<std::tuple<uint64_t, uint64_t, size_t>> order;
  order.reserve(matrices.size());
  for (size_t i = 0; i < matrices.size(); ++i) {
    const TiledMatrix& matrix = matrices[i].matrix;
    order.emplace_back(matrix.view.tensor->offset, block_offset(matrix, 0), i);
  }
  std::sort(order.begin(), order.end());
  ReadPlan plan;
  plan.matrices.reserve(matrices.size());
  for (const auto& [tensor, first, index] : order) {
    plan.matrices.push_back(matrices[index]);
  }
  for (size_t begin = 0; begin < plan.matrices.size();) {
    const TiledMatrix& first = plan.matrices[begin].matrix;
    Extent heads = head_of(first);
    size_t end = begin + 1;
    for (; end < plan.matrices.size() && belong_together(first, heads, plan.matrices[end].matrix); ++end) {
      heads.add(head_of(plan.matrices[end].matrix));
    }
    append_parts(plan, begin, end);
    begin = end;
  }
  std::stable_sort(plan.parts.begin(), plan.parts.end(),
                   [](const ReadPart& x, const ReadPart& y) { return x.granule < y.granule; });
  append_units(plan);
  return plan;
}

}  // namespace moelora
