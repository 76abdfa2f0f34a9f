// SPDX-License-Identifier: Apache-2.0
// What this machine can do at best, measured beside an op in the same process: bytes read a second from given
// memory, and fp32 multiply-adds a second out of registers. Shared machines change speed from second to second,
// so a bench measures a ceiling next to every figure and quotes ratios.
#pragma once

#include <cstddef>

#include "kernels/base/stream.h"

namespace moelora {

double seconds_now();

// GB/s of reading `bytes` at `data` once with all workers.
double read_ceiling(const std::byte* data, size_t bytes, Stream& stream);

// GFLOP/s of independent fp32 multiply-adds on all workers, on the widest vectors of this processor.
double fma_ceiling(Stream& stream);

}  // namespace moelora
