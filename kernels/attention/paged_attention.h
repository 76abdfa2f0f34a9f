// SPDX-License-Identifier: Apache-2.0
// paged_attention: causal attention of new rows over their sequence's paged K and V (written before).
//
//   out[t, h] = sum_j p_j V[j, h'],  p = softmax_j(scale * q[t, h] . K[j, h']),  h' = h / (Nq / Nkv),
//   j from (window > 0 ? max(0, pos - window + 1) : 0) to pos = positions[t]; with sinks, exp(sink[h]) joins the
//   denominator (not scaled) and takes no value.
// Sequence s owns rows row_begin[s] .. row_begin[s+1]) of the batch, at consecutive positions. fp32 softmax.
// A row's bits depend on its own q and context alone (keys are visited in blocks counted from the first
// block in sight), not on how a prompt was cut into chunks. Keys outside the range are never read: unwritten
// memory may hold NaN. CUDA has two paths: rows of a sequence with several rows keep that promise among each other; the
// one row of a sequence (decode) has its keys split by a number that num_sequences decides, so its bits depend on
// that too.
// With `rope` the op first does rope_kv_write of the same rows, and is those two ops one after the other, but q need
// not be rotated in memory after it. CUDA does both in one kernel where no sequence has several rows.
#pragma once

#include "kernels/attention/kv_view.h"
#include "kernels/attention/rope_kv_write.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor.h"

namespace moelora {

struct PagedAttentionArgs {
  Rows q;    // [T, Nq * D]
  Rows out;  // [T, Nq * D]
  int32_t num_sequences = 0;
  int32_t num_heads = 0;               // Nq
  const int32_t* row_begin = nullptr;  // [num_sequences + 1]
  const int32_t* positions = nullptr;  // [T]
  float scale = 0.0f;
  int32_t window = 0;            // 0 = all
  const float* sinks = nullptr;  // [Nq] or null
  KvView kv;
  int32_t layer = 0;
  const RopeKvWriteArgs* rope = nullptr;  // or of the rows above: the same q, positions, kv and layer
  // CUDA only; host values. num_rows: T, or more. At most num_sequences promises that no sequence has several rows.
  int32_t num_rows = 0;
  std::byte* scratch = nullptr;  // device memory, contents undefined
  size_t scratch_bytes = 0;      // paged_attention_scratch_bytes
};

// Blocks that share the keys of one decode row and head at most.
constexpr int kMaxAttentionSplits = 8;
// Partial results of decode rows: the sum over the keys of a split, its largest score and its denominator.
constexpr size_t paged_attention_scratch_bytes(size_t num_sequences, size_t num_heads, size_t head_dim) {
  return num_sequences * num_heads * kMaxAttentionSplits * (head_dim + 2) * sizeof(float);
}

void paged_attention_cpu(const PagedAttentionArgs& args, Stream& stream);  // reference
void paged_attention_simd(const PagedAttentionArgs& args, Stream& stream);
// q fp32, out bf16 or fp32, KV bf16. D a multiple of 16 up to 256, block_tokens a multiple of 16, up to 1024 sequences.
void paged_attention_cuda(const PagedAttentionArgs& args, Stream& stream);

}  // namespace moelora
