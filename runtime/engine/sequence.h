// SPDX-License-Identifier: Apache-2.0
// A request in flight. Submission is what host and engine share; Sequence is the engine's part of it: tokens,
// progress, pages, state. Everything a sequence will ever need is taken at submit, so that steps allocate nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/engine/request.h"
#include "runtime/engine/session.h"
#include "runtime/engine/token_stream.h"
#include "runtime/memory/swap_space.h"

namespace moelora {

struct Sequence;

struct Submission {
  Request request;
  std::unique_ptr<TokenStream> stream;
  std::atomic<bool> cancelled{false};
  std::atomic<bool> drop_turn{false};  // cancel rolls the session back
  std::once_flag text_asked;           // the first reader of text makes
  std::unique_ptr<OutputText> text;    // this, and whoever reads has it
  double submitted_ms = 0;
  double deadline_at_ms = 0;  // absolute, monotonic; 0 = none
};

enum class SequenceState : uint8_t { kWaiting, kRunning, kFinished };

struct Sequence {
  std::shared_ptr<Submission> submission;
  SequenceState state = SequenceState::kWaiting;
  uint64_t arrival = 0;
  std::vector<int32_t> tokens;     // history of the session, prompt, output; capacity for tokens_max
  size_t tokens_max = 0;           // history + prompt + max_tokens, at most the context
  int32_t num_history = 0;         // tokens before this request's prompt
  int32_t num_prompt = 0;          // history + prompt: outputs start here
  std::shared_ptr<KvSequence> kv;  // kv->length tokens are computed
  Swap swap;                       // while it waits: its KV is in host memory
  PrefixSpace* space = nullptr;    // of the prefix cache, from submit to finish; null without one
  int32_t slot = 0;                // adapter slot, held while running
  float row_scale = 0.0f;
  int32_t batch_row = -1;  // index of the running sequence among per-sequence device state (penalties)
  bool token_state_ready = false;
  int64_t blocked_at = -1;  // step in which those behind it could first go before it
  bool is_late = false;     // cannot end before its deadline
  bool has_paid = false;    // this and the next two: fair_order.h
  double fair_key = 0;
  Sequence* next_of_adapter = nullptr;
  int32_t num_cached_seen = 0;        // tokens that a failed try to start found in the prefix cache
  int32_t num_tries = 0;              // to start that failed for lack of pages
  int32_t num_uploads = 0;            // begun for this one while it waited
  std::vector<int32_t> suppressed;    // stop and eos tokens, banned before min_tokens
  std::unique_ptr<OutputText> stops;  // finds stop strings; null without any
  RequestResult result;
  double started_ms = 0;
  double adapter_wanted_ms = 0;  // when it first had to wait for its adapter
  double first_token_ms = 0;

  [[nodiscard]] const Request& request() const { return submission->request; }
  // The number of the stop string that an output token completes, -1 if it does not.
  int32_t stop_string(int32_t token) {
    if (stops == nullptr) {
      return -1;
    }
    const int32_t number = stops->push(token);
    stops->take(stops->ready().size());  // only the end is of interest here
    return number;
  }
  [[nodiscard]] int32_t num_tokens() const { return static_cast<int32_t>(tokens.size()); }
  [[nodiscard]] int32_t num_outputs() const { return num_tokens() - num_prompt; }
  // Output that the reader has not taken, delivered or not.
  [[nodiscard]] size_t num_unread() const {
    return static_cast<size_t>(num_outputs()) - submission->stream->num_read();
  }
  // Tokens that are not in the KV yet: 1 in decode.
  [[nodiscard]] int32_t num_pending() const { return num_tokens() - kv->length; }
};

}  // namespace moelora
