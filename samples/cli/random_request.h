// SPDX-License-Identifier: Apache-2.0
// What a benchmark asks: random tokens in, a fixed number out.
#pragma once

#include <random>
#include <vector>

#include "samples/cli/host.h"

namespace moelora_cli {

// `adapter` 0: the base. Not submitted yet.
template <class Random>
Request random_request(moelora_engine* engine, int32_t vocab_size, Random& random, int32_t input, int32_t output,
                       moelora_adapter adapter) {
  std::uniform_int_distribution<int32_t> token(0, vocab_size - 1);
  std::vector<int32_t> prompt(static_cast<size_t>(input));
  for (int32_t& id : prompt) {
    id = token(random);
  }
  moelora_sampling sampling;
  moelora_sampling_init(&sampling);
  sampling.max_tokens = output;
  sampling.flags = MOELORA_SAMPLING_IGNORE_EOS;
  Request request(engine);
  request.set_tokens(prompt);
  request.set_sampling(sampling);
  if (adapter != 0) {
    request.set_adapter(adapter, 1.0f);
  }
  return request;
}

}  // namespace moelora_cli
