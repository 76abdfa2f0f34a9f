// SPDX-License-Identifier: Apache-2.0
// read_memory: reads `bytes` at `data` once, in order, with every worker: the ceiling that memory-bound steps are
// compared with. sum (may be null) gets the wrapping sum of all whole 8-byte words, so that nothing is optimised away.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/stream.h"

namespace moelora {

struct ReadMemoryArgs {
  const std::byte* data = nullptr;
  size_t bytes = 0;
  uint64_t* sum = nullptr;
};

void read_memory_cpu(const ReadMemoryArgs& args, Stream& stream);   // reference
void read_memory_simd(const ReadMemoryArgs& args, Stream& stream);
void read_memory_cuda(const ReadMemoryArgs& args, Stream& stream);  // returns when the reading is done

}  // namespace moelora
