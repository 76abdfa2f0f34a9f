// SPDX-License-Identifier: Apache-2.0
// The way out: tokens of one request from the engine thread to whoever reads it, and events to a completion
// queue. Storage is reserved at submit, so that emitting allocates nothing. Outlives the engine if a host still
// holds it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "runtime/engine/request.h"

namespace moelora {

enum class EventKind : int32_t {
  kTokens = 1, kFinished = 2, kAdapterReady = 3, kSessionEvicted = 4, kEngineFailed = 5, kWake = 6
};
struct Event {
  EventKind kind = EventKind::kWake;
  Status status = Status::kOk;
  uint64_t handle = 0;  // request, adapter or session
  uint64_t tag = 0;
};

// Completion queue with an eventfd that is readable while the queue is not empty. At most one kTokens event a
// stream is queued at a time. All functions are thread-safe.
class CompletionQueue {
 public:
  CompletionQueue();
  ~CompletionQueue();
  CompletionQueue(const CompletionQueue&) = delete;
  CompletionQueue& operator=(const CompletionQueue&) = delete;
  void push(const Event& event);
  // Waits up to timeout_ms (0 poll, negative for ever); returns the number of events copied. `closed` is set if
  // the queue was closed meanwhile.
  size_t wait(int32_t timeout_ms, Event* events, size_t capacity, bool* closed);
  void wake();
  void close();
  [[nodiscard]] int fd() const { return fd_; }

 private:
  void signal();
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<Event> events_;
  int fd_ = -1;
  bool closed_ = false;
};

struct TopLogprob {
  int32_t position;  // of the output token, from 0
  int32_t token;
  float logprob;
  int32_t rank;      // 1 = most likely; the sampled token's own entry comes first at each position
};

struct RequestResult {
  FinishReason finish = FinishReason::kNone;
  Status status = Status::kOk;
  std::string message;         // of an error
  int32_t prompt_tokens = 0;
  int32_t output_tokens = 0;
  int32_t cached_tokens = 0;   // prompt tokens not computed again (session, prefix)
  int32_t stop_index = -1;     // which stop token; -1 = eos or none
  int32_t preemptions = 0;
  uint64_t seed = 0;
  double queue_ms = 0, prefill_ms = 0, decode_ms = 0, adapter_wait_ms = 0, first_token_ms = 0;
};

class TokenStream {
 public:
  // Reserves room for max_tokens tokens, logprob entries and captured logits rows.
  TokenStream(const Request& request, int32_t vocab_size, std::shared_ptr<CompletionQueue> queue, uint64_t handle,
              uint64_t tag);

  // Engine thread.
  void emit(int32_t token, const TopLogprob* logprobs, size_t num_logprobs);
  void capture(int32_t position, const float* logits);
  void finish(const RequestResult& result);
  [[nodiscard]] size_t unread() const;

  // Reader's side. kOk: n tokens copied (>= 1); kTimeout; kEnd: finished and all read; kClosed: close_reader().
  // kBusy: another reader is inside.
  Status read(int32_t timeout_ms, int32_t* tokens, size_t capacity, size_t* n);
  void close_reader();
  [[nodiscard]] bool finished() const;
  [[nodiscard]] RequestResult result() const;
  size_t read_logprobs(int32_t first_position, int32_t num_positions, TopLogprob* buffer, size_t capacity, size_t* needed) const;
  // Captured logits, rows in order of position from first_position().
  [[nodiscard]] int32_t captured_rows() const;
  [[nodiscard]] int32_t captured_first() const;
  size_t read_captured(int32_t row, float* buffer, size_t capacity) const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable ready_;
  std::vector<int32_t> tokens_;
  size_t num_read_ = 0;
  std::vector<TopLogprob> logprobs_;
  std::vector<float> captured_;
  int32_t captured_first_ = -1;
  int32_t captured_rows_ = 0;
  int32_t vocab_size_ = 0;
  RequestResult result_;
  bool finished_ = false;
  bool reader_closed_ = false;
  bool reading_ = false;
  std::shared_ptr<CompletionQueue> queue_;
  uint64_t handle_ = 0;
  uint64_t tag_ = 0;
  bool event_pending_ = false;
};

}  // namespace moelora
