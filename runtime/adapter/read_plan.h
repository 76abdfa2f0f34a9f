// SPDX-License-Identifier: Apache-2.0
// In which pieces a file is read so that each of its bytes is read once, a piece fits a core's cache if its matrices
// can be divided, and what comes of the pieces lies about in the stream's order. Matrices whose stored elements are
// interleaved (experts by turns in one tensor) are packed together, block of columns by block of columns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/adapter/stream_plan.h"

namespace moelora {

// Blocks of columns of some matrices, whose elements lie in one range of the file.
struct ReadPart {
  size_t begin = 0, end = 0;  // of ReadPlan::matrices
  int32_t first_block = 0, end_block = 0;
  uint64_t offset = 0, end_offset = 0;  // in the file
  int32_t granule = 0;                  // the first that any of the matrices has
};

// Parts that follow each other in the file, read at once.
struct ReadUnit {
  size_t begin = 0, end = 0;  // of ReadPlan::parts
  uint64_t offset = 0, end_offset = 0;
  int32_t granule = 0;
  [[nodiscard]] size_t bytes() const { return static_cast<size_t>(end_offset - offset); }
};

struct ReadPlan {
  std::vector<MatrixPlace> matrices;  // in the order of their elements in the file
  std::vector<ReadPart> parts;        // by granule
  std::vector<ReadUnit> units;        // by granule: what is before a unit's granule, no later unit writes to
  size_t largest_unit = 0;            // bytes
};

ReadPlan plan_reads(std::vector<MatrixPlace> matrices);

// Where in the file the first element of a block of columns is.
uint64_t block_offset(const TiledMatrix& matrix, int32_t block);

}  // namespace moelora
