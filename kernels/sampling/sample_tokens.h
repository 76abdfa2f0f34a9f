// SPDX-License-Identifier: Apache-2.0
// sample_tokens: one token for each row of logits.
//
// Order: suppressed tokens to -inf; repetition penalty (tokens of prompt and output: positive logits divided,
// negative multiplied), presence and frequency (output only); greedy (temperature 0): argmax; else temperature,
// min-p (p >= min_p * max p), top-k, top-p (smallest set of sum >= top_p, the crossing token included), draw.
// top-p renormalises over what min-p and top-k left.
// Ties: lowest id. Logprobs and ranks are of the raw logits, before all of this. A row with a NaN or +inf, or without
// any finite logit (also once the suppressed tokens are gone), gets status 1 and token -1.
// `rows`, what they point to, and `outputs` are host memory on every backend; outputs are complete on return.
// The draw uses Philox4x32-10 (Salmon et al. 2011), key = seed, counter = draw index of the request: it depends on
// nothing else in the batch.
#pragma once

#include "kernels/base/stream.h"
#include "kernels/base/tensor.h"

namespace moelora {

constexpr int32_t kMaxTopLogprobs = 20;

struct SampleRow {
  float temperature = 0.0f;  // 0 = greedy
  int32_t top_k = 0;         // 0 = off
  float top_p = 1.0f;
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  int32_t num_top_logprobs = -1;  // -1: none wanted; n >= 0: the token's own, and the n best
  uint64_t seed = 0;
  uint64_t draw_index = 0;
  // [V] or null: bit 15 = in the prompt, bits 0..14 = count in the output. Read only.
  const uint16_t* token_state = nullptr;
  const int32_t* suppressed = nullptr;  // ids never drawn here (eos and stop tokens before min_tokens)
  int32_t num_suppressed = 0;
};

struct SampleOutput {
  int32_t token = -1;
  int32_t status = 0;       // 1 = no usable logits
  float logprob = 0.0f;     // if wanted
  int32_t rank = 0;         // 1 = most likely; if wanted
  int32_t top_ids[kMaxTopLogprobs];
  float top_logprobs[kMaxTopLogprobs];
};

struct SampleTokensArgs {
  Rows logits;                       // [S, V] fp32, device memory; left as they are
  int32_t num_rows = 0;
  int32_t vocab_size = 0;
  const SampleRow* rows = nullptr;   // [S]
  SampleOutput* outputs = nullptr;   // [S]
};

// Bytes of Stream scratch a worker needs.
constexpr size_t sample_tokens_scratch_bytes(size_t vocab_size) { return vocab_size * 12 + 256; }

void sample_tokens_cpu(const SampleTokensArgs& args, Stream& stream);
void sample_tokens_cuda(const SampleTokensArgs& args, Stream& stream);

}  // namespace moelora
