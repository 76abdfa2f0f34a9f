// SPDX-License-Identifier: Apache-2.0
// One row of sample_tokens on the calling thread: the whole CPU backend's sampler, and the CUDA backend's for rows
// whose options its kernels do not know.
#pragma once

#include <cstddef>

#include "kernels/sampling/sample_tokens.h"

namespace moelora {

// logits [count] in host memory, left as they are; scratch of sample_tokens_scratch_bytes(count), 64-byte aligned.
void sample_row_host(const SampleRow& row, const float* logits, int32_t count, std::byte* scratch,
                     SampleOutput& output);

}  // namespace moelora
