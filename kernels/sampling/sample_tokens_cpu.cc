// SPDX-License-Identifier: Apache-2.0
// The sample_tokens of every CPU backend, a row a task. A greedy row without penalties is one pass over its logits. A
// sampled row copies its logits to the worker's scratch, is cut by top-k before any exponential is taken
// (min-p and top-k both keep a prefix of the same order, so they commute), then by min-p and top-p, and draws
// in order of id.
#include "kernels/sampling/sample_tokens.h"

#include <cmath>
#include <limits>

#include "kernels/base/top_list.h"
#include "kernels/sampling/candidates.h"
#include "kernels/sampling/exp_block.h"
#include "kernels/sampling/philox.h"
#include "kernels/sampling/sample_row.h"

namespace moelora {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

struct Best {
  int32_t id = -1;
  float logit = kLowest;
  bool usable = false;
};

// Largest value and its lowest id. Whole blocks are compared lane by lane; only the winner is searched.
Best find_best(const float* logits, int32_t count) {
  constexpr int32_t kBlock = 256;
  constexpr int32_t kLanes = 16;
  Best best;
  int32_t best_begin = 0;
  uint32_t nans = 0;
  for (int32_t begin = 0; begin < count; begin += kBlock) {
    float block_best = kLowest;
    if (begin + kBlock <= count) {
      float lanes[kLanes];
      uint32_t unordered[kLanes] = {};
      for (float& lane : lanes) {
        lane = kLowest;
      }
      for (int32_t at = begin; at < begin + kBlock; at += kLanes) {
        for (int32_t lane = 0; lane < kLanes; ++lane) {
          const float value = logits[at + lane];
          lanes[lane] = value > lanes[lane] ? value : lanes[lane];
          unordered[lane] |= value != value ? 1u : 0u;
        }
      }
      for (float lane : lanes) {
        block_best = lane > block_best ? lane : block_best;
      }
      for (uint32_t lane : unordered) {
        nans |= lane;
      }
    } else {
      for (int32_t at = begin; at < count; ++at) {
        block_best = logits[at] > block_best ? logits[at] : block_best;
        nans |= logits[at] != logits[at] ? 1u : 0u;
      }
    }
    if (block_best > best.logit) {
      best.logit = block_best;
      best_begin = begin;
    }
  }
  best.usable = nans == 0 && std::isfinite(best.logit);
  if (!best.usable) {
    return best;
  }
  best.id = best_begin;
  while (logits[best.id] != best.logit) {
    ++best.id;
  }
  return best;
}

bool penalised(const SampleRow& row) {
  return row.token_state != nullptr &&
         (row.repetition_penalty != 1.0f || row.presence_penalty != 0.0f || row.frequency_penalty != 0.0f);
}

void penalise(const SampleRow& row, int32_t count, float* logits) {
  for (int32_t v = 0; v < count; ++v) {
    const uint16_t state = row.token_state[v];
    if (state == 0) {
      continue;
    }
    const int32_t in_output = state & 0x7fff;
    float logit = logits[v];
    logit = logit > 0.0f ? logit / row.repetition_penalty : logit * row.repetition_penalty;
    if (in_output > 0) {
      logit -= row.presence_penalty + static_cast<float>(in_output) * row.frequency_penalty;
    }
    logits[v] = logit;
  }
}

struct Scratch {
  float* logits;
  float* weights;
  int32_t* ids;
};

int32_t draw(const SampleRow& row, const float* logits, int32_t count, float largest, const Scratch& scratch) {
  Candidates list{scratch.logits, scratch.weights, scratch.ids, count};
  for (int32_t v = 0; v < count; ++v) {
    list.logits[v] = logits[v];
    list.ids[v] = v;
  }
  if (row.top_k > 0) {
    keep_top_k(list, row.top_k);
  }
  exp_scaled(list.logits, list.count, largest, row.temperature, list.weights);
  if (row.min_p > 0.0f) {
    keep_weight_at_least(list, row.min_p);
  }
  if (row.top_p < 1.0f) {
    keep_top_p(list, static_cast<double>(row.top_p));
  }
  return draw_candidate(list, philox_uniform(row.seed, row.draw_index));
}

void report_logprobs(const SampleRow& row, const float* logits, int32_t count, float largest, const Scratch& scratch,
                     SampleOutput& output) {
  exp_scaled(logits, count, largest, 1.0f, scratch.weights);
  double sum = 0.0;
  for (int32_t v = 0; v < count; ++v) {
    sum += static_cast<double>(scratch.weights[v]);
  }
  const double log_total = static_cast<double>(largest) + std::log(sum);
  const float own = logits[output.token];
  int32_t better = 0;
  for (int32_t v = 0; v < count; ++v) {
    better += logits[v] > own || (logits[v] == own && v < output.token) ? 1 : 0;
  }
  output.rank = better + 1;
  output.logprob = static_cast<float>(static_cast<double>(own) - log_total);
  const int32_t wanted = row.num_top_logprobs < kMaxTopLogprobs ? row.num_top_logprobs : kMaxTopLogprobs;
  TopList top(wanted < count ? wanted : count, output.top_logprobs, output.top_ids);
  for (int32_t v = 0; v < count; ++v) {
    top.offer(logits[v], v);
  }
  for (int32_t i = 0; i < top.count(); ++i) {
    output.top_logprobs[i] = static_cast<float>(static_cast<double>(output.top_logprobs[i]) - log_total);
  }
}

}  // namespace

void sample_row_host(const SampleRow& row, const float* logits, int32_t count, std::byte* memory,
                     SampleOutput& output) {
  // Arrays start on cache lines; the 256 spare bytes of the scratch pay for the rounding.
  const auto stride = (static_cast<int64_t>(count) + 15) / 16 * 16;
  auto* base = reinterpret_cast<float*>(memory);
  const Scratch scratch{base, base + stride, reinterpret_cast<int32_t*>(base + 2 * stride)};
  output.token = -1;
  output.status = 1;
  const Best raw = find_best(logits, count);
  if (!raw.usable) {
    return;
  }
  Best best = raw;
  const float* adjusted = logits;
  if (penalised(row) || row.num_suppressed > 0) {
    std::memcpy(scratch.logits, logits, static_cast<size_t>(count) * sizeof(float));
    for (int32_t i = 0; i < row.num_suppressed; ++i) {
      scratch.logits[row.suppressed[i]] = kLowest;
    }
    if (penalised(row)) {
      penalise(row, count, scratch.logits);
    }
    adjusted = scratch.logits;
    best = find_best(adjusted, count);
    if (!best.usable) {
      return;
    }
  }
  output.status = 0;
  output.token = row.temperature == 0.0f ? best.id : draw(row, adjusted, count, best.logit, scratch);
  if (row.num_top_logprobs >= 0) {
    report_logprobs(row, logits, count, raw.logit, scratch, output);
  }
}

void sample_tokens_cpu(const SampleTokensArgs& args, Stream& stream) {
  MOELORA_ASSERT(stream.scratch_bytes() >= sample_tokens_scratch_bytes(static_cast<size_t>(args.vocab_size)));
  const float* const logits = args.logits.f32();
  stream.parallel_for(static_cast<size_t>(args.num_rows), [&](size_t index, int worker) {
    sample_row_host(args.rows[index], logits + static_cast<int64_t>(index) * args.logits.stride, args.vocab_size,
                    stream.scratch(worker), args.outputs[index]);
  });
}

}  // namespace moelora
