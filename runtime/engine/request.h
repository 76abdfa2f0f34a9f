// SPDX-License-Identifier: Apache-2.0
// What a host asked for. Built by one thread, immutable after submit.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/text/output_text.h"

namespace moelora {

struct Adapter;
struct Session;

struct Sampling {
  float temperature = 0.0f;
  int32_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  uint64_t seed = 0;  // 0 = choose and report
  int32_t max_tokens = 16;
  int32_t min_tokens = 0;
  int32_t logprobs = -1;  // -1 none; n: the token's own and the n best
  bool ignore_eos = false;
};

struct Request {
  std::vector<int32_t> prompt;
  std::vector<int32_t> opening;      // put before the prompt unless a session has a history: BOS of a text
  std::shared_ptr<Adapter> adapter;  // null = base
  float scale = 1.0f;                // request's factor; the adapter handle's own comes on top
  std::shared_ptr<Session> session;  // null = one-shot
  Sampling sampling;
  std::vector<int32_t> stop_tokens;
  std::vector<StopString> stop_strings;        // numbered in order of adding, stop tokens counted too
  std::shared_ptr<const Tokenizer> tokenizer;  // null only without stop strings
  int32_t priority = 0;                        // higher first
  uint64_t deadline_ms = 0;                    // from submit; 0 = none
  std::string cache_salt;
  int32_t capture_from = -1;  // first position whose logits are kept (experimental); -1 = none

  // Of a stop token, in order of adding among all stops.
  [[nodiscard]] int32_t stop_number(size_t stop_token) const {
    auto number = static_cast<int32_t>(stop_token);
    for (const StopString& stop : stop_strings) {
      number += stop.number <= number ? 1 : 0;
    }
    return number;
  }
};

enum class FinishReason : int32_t { kNone = 0, kStop = 1, kLength = 2, kCancelled = 3, kDeadline = 4, kError = 5 };

}  // namespace moelora
