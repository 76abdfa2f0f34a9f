// SPDX-License-Identifier: Apache-2.0
// embedding: out[t, :] = table[token_ids[t], :], widened to fp32. token_ids in [0, V), checked by the caller.
#pragma once

#include "kernels/base/stream.h"
#include "kernels/base/tensor.h"

namespace moelora {

struct EmbeddingArgs {
  Weight table;                        // [V, H]
  const int32_t* token_ids = nullptr;  // [T]
  int32_t num_rows = 0;
  Rows out;                            // [T, H] fp32
};

void embedding_cpu(const EmbeddingArgs& args, Stream& stream);
void embedding_cuda(const EmbeddingArgs& args, Stream& stream);

}  // namespace moelora
