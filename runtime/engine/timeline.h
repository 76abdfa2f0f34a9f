// SPDX-License-Identifier: Apache-2.0
// What an engine did, in time: steps, uploads of adapters and requests, the newest of each in one ring. Its memory is
// taken at open, so that a step writes an event and allocates nothing; the oldest events leave. Callers hold the
// engine's lock. Whoever wants to look copies the events out and writes them as a trace (write_timeline).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

namespace moelora {

struct StepEvent {
  double start_ms = 0, end_ms = 0;
  uint64_t index = 0;  // of all steps of the engine
  int32_t rows = 0, prefill_rows = 0, sequences = 0, adapters = 0;
  int32_t running = 0, waiting = 0;  // requests, after the step
  int32_t loads = 0;                 // uploads begun since the step before
  int32_t pages_free = 0, pages_kv = 0, pages_adapter = 0;
};

struct UploadEvent {
  double start_ms = 0, end_ms = 0;
  uint64_t adapter = 0;
  uint64_t bytes = 0;
};

struct RequestEvent {
  double submitted_ms = 0, started_ms = 0, first_token_ms = 0, end_ms = 0;  // 0: not reached
  uint64_t adapter = 0;                                                     // 0 = the base model
  int32_t prompt_tokens = 0, output_tokens = 0;
  int32_t finish = 0;  // FinishReason
};

using TimelineEvent = std::variant<StepEvent, UploadEvent, RequestEvent>;

class Timeline {
 public:
  // 0 = off: nothing is kept.
  explicit Timeline(size_t capacity = 0) : events_(capacity) {}

  [[nodiscard]] bool is_on() const { return !events_.empty(); }
  void add(const TimelineEvent& event) {
    if (is_on()) {
      events_[num_added_++ % events_.size()] = event;
    }
  }
  [[nodiscard]] uint64_t num_added() const { return num_added_; }
  [[nodiscard]] uint64_t first_kept() const { return num_added_ - std::min<uint64_t>(num_added_, events_.size()); }
  [[nodiscard]] const TimelineEvent& event(uint64_t index) const { return events_[index % events_.size()]; }

 private:
  std::vector<TimelineEvent> events_;  // ring
  uint64_t num_added_ = 0;
};

// In the trace event format of Chrome and Perfetto: steps and uploads as slices of a track each, requests as
// asynchronous slices with their phases, pages and queue as counters. Times are microseconds of the monotonic clock.
// `names` are those of adapters. Throws Error{kIo}.
void write_timeline(const std::string& path, const std::vector<TimelineEvent>& events, uint64_t num_dropped,
                    const std::unordered_map<uint64_t, std::string>& names);

}  // namespace moelora
