// SPDX-License-Identifier: Apache-2.0
// Oracle of the sampler for sample_tokens_test: the whole order of operations by full sorts in double, one row at a
// time, giving the probability of each token.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "tests/support/backends.h"
#include "tests/support/draw.h"
#include "tests/support/poison.h"

namespace moelora::test {

constexpr float kInf = std::numeric_limits<float>::infinity();

inline SampleRow sampled(float temperature, int32_t top_k, float top_p, float min_p) {
  SampleRow row;
  row.temperature = temperature;
  row.top_k = top_k;
  row.top_p = top_p;
  row.min_p = min_p;
  return row;
}

inline std::vector<SampleOutput> sample(const Kernels& kernels, Stream& stream, const PoisonedRows& logits,
                                        const std::vector<SampleRow>& rows) {
  std::vector<SampleOutput> outputs(rows.size());
  SampleTokensArgs args;
  args.logits = logits.view();
  args.num_rows = static_cast<int32_t>(rows.size());
  args.vocab_size = static_cast<int32_t>(logits.width());
  args.rows = rows.data();
  args.outputs = outputs.data();
  kernels.sample_tokens(args, stream);
  return outputs;
}

inline std::vector<double> adjusted_logits(const SampleRow& row, const float* logits, int32_t vocab) {
  std::vector<double> result(logits, logits + vocab);
  for (int32_t i = 0; i < row.num_suppressed; ++i) {
    result[static_cast<size_t>(row.suppressed[i])] = -std::numeric_limits<double>::infinity();
  }
  for (int32_t v = 0; v < vocab && row.token_state != nullptr; ++v) {
    double& logit = result[static_cast<size_t>(v)];
    const int32_t count = row.token_state[v] & 0x7fff;
    if (row.token_state[v] != 0) {
      logit = logit > 0 ? logit / static_cast<double>(row.repetition_penalty)
                        : logit * static_cast<double>(row.repetition_penalty);
    }
    if (count > 0) {
      logit -= static_cast<double>(row.presence_penalty) + count * static_cast<double>(row.frequency_penalty);
    }
  }
  return result;
}

// Probability of each token, for a temperature above 0.
inline std::vector<double> probabilities(const SampleRow& row, const float* logits, int32_t vocab) {
  const std::vector<double> adjusted = adjusted_logits(row, logits, vocab);
  std::vector<int32_t> order(static_cast<size_t>(vocab));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return adjusted[static_cast<size_t>(a)] > adjusted[static_cast<size_t>(b)];
  });
  const double largest = adjusted[static_cast<size_t>(order[0])];
  std::vector<double> mass;
  for (const int32_t id : order) {
    mass.push_back(std::exp((adjusted[static_cast<size_t>(id)] - largest) / static_cast<double>(row.temperature)));
  }
  size_t kept = 0;
  while (kept < mass.size() && mass[kept] >= static_cast<double>(row.min_p)) {
    ++kept;
  }
  if (row.top_k > 0) {
    kept = std::min(kept, static_cast<size_t>(row.top_k));
  }
  const double total = std::accumulate(mass.begin(), mass.begin() + static_cast<int64_t>(kept), 0.0);
  if (row.top_p < 1.0f) {
    double sum = 0.0;
    size_t nucleus = 0;
    do {
      sum += mass[nucleus++];
    } while (nucleus < kept && sum < static_cast<double>(row.top_p) * total);
    kept = nucleus;
  }
  const double final_total = std::accumulate(mass.begin(), mass.begin() + static_cast<int64_t>(kept), 0.0);
  std::vector<double> result(static_cast<size_t>(vocab), 0.0);
  for (size_t i = 0; i < kept; ++i) {
    result[static_cast<size_t>(order[i])] = mass[i] / final_total;
  }
  return result;
}

}  // namespace moelora::test
