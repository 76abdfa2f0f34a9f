// SPDX-License-Identifier: Apache-2.0
// The way out: tokens of one request from the engine thread to whoever reads it, and events to a completion
// queue. Storage is reserved at submit, so that emitting allocates nothing. Outlives the engine if a host still
// holds it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "runtime/engine/request.h"

namespace moelora {

enum class EventKind : int32_t {
  kTokens = 1,
  kFinished = 2,
  kAdapterReady = 3,
  kSessionEvicted = 4,
  kEngineFailed = 5,
  kWake = 6
};
struct Event {
  EventKind kind = EventKind::kWake;
  Status status = Status::kOk;
  uint64_t handle = 0;  // request, adapter or session
  uint64_t tag = 0;
};

// Completion queue with an eventfd that is readable while the queue is not empty. At most one kTokens event a
// stream and one kWake event are queued at a time. All functions are thread-safe. Whoever will push from the engine
// thread announces it by `expect`, so that a push finds room: at most the number expected is outstanding.
class CompletionQueue {
 public:
  CompletionQueue();
  ~CompletionQueue();
  CompletionQueue(const CompletionQueue&) = delete;
  CompletionQueue& operator=(const CompletionQueue&) = delete;
  // `taken`, if any, is set to true when a waiter takes the event.
  void push(const Event& event, std::shared_ptr<std::atomic<bool>> taken = nullptr);
  // Makes room for `count` more events that can be outstanding at once; `expect(-count)` gives it back.
  void expect(int count);
  // Waits up to timeout_ms (0 poll, negative for ever); returns the number of events copied. `closed` is set if
  // the queue was closed meanwhile.
  size_t wait(int32_t timeout_ms, Event* events, size_t capacity, bool* closed);
  void wake();
  void close();
  [[nodiscard]] int fd() const { return fd_; }

 private:
  struct Slot {
    Event event;
    std::shared_ptr<std::atomic<bool>> taken;
  };
  void push_locked(const Event& event, std::shared_ptr<std::atomic<bool>> taken);
  void grow(size_t capacity);
  void signal();
  std::mutex mutex_;
  std::condition_variable ready_;
  std::vector<Slot> ring_;
  size_t first_ = 0;
  size_t size_ = 0;
  size_t expected_ = 0;
  int fd_ = -1;
  bool closed_ = false;
};

struct TopLogprob {
  int32_t position;  // of the output token, from 0
  int32_t token;
  float logprob;
  int32_t rank;  // 1 = most likely; the sampled token's own entry comes first at each position
};

struct RequestResult {
  FinishReason finish = FinishReason::kNone;
  Status status = Status::kOk;
  std::string message;  // of an error
  int32_t prompt_tokens = 0;
  int32_t output_tokens = 0;
  int32_t cached_tokens = 0;  // prompt tokens not computed again (session, prefix)
  int32_t stop_index = -1;    // which stop token; -1 = eos or none
  int32_t preemptions = 0;
  uint64_t seed = 0;
  double queue_ms = 0, prefill_ms = 0, decode_ms = 0, adapter_wait_ms = 0, first_token_ms = 0;
};

class TokenStream {
 public:
  // Reserves room for max_tokens tokens, logprob entries and captured logits rows; history_tokens is the length of
  // the session before this request.
  TokenStream(const Request& request, int32_t vocab_size, std::shared_ptr<CompletionQueue> queue, uint64_t handle,
              uint64_t tag, int64_t history_tokens = 0);
  ~TokenStream();
  TokenStream(const TokenStream&) = delete;
  TokenStream& operator=(const TokenStream&) = delete;

  [[nodiscard]] const std::shared_ptr<CompletionQueue>& queue() const { return queue_; }
  // Engine thread.
  // in_text false: a stop token; no other follows.
  void emit(int32_t token, const TopLogprob* logprobs, size_t num_logprobs, bool in_text = true);
  void capture(int32_t position, const float* logits, float router_gap);
  void finish(const RequestResult& result);
  [[nodiscard]] size_t unread() const;

  // Reader's side. kOk: n tokens copied (>= 1, or bytes of text); kTimeout; kEnd: finished and all read; kClosed:
  // close_reader(). kBusy: another reader is inside. Text, if asked for, is that of the tokens that were read; a
  // capacity of 0 reads text alone and the tokens with it.
  Status read(int32_t timeout_ms, int32_t* tokens, size_t capacity, size_t* n, TextTarget* text = nullptr);
  // Wakes the reader; from here on no event is pushed.
  void close_reader();
  [[nodiscard]] bool finished() const;
  [[nodiscard]] size_t num_read() const;
  [[nodiscard]] RequestResult result() const;
  // Copies the entries of those positions if all fit; `needed` gets their number. Returns the number copied.
  size_t read_logprobs(int32_t first_position, int32_t num_positions, TopLogprob* buffer, size_t capacity,
                       size_t* needed) const;
  // Captured logits, rows in order of position from first_position().
  [[nodiscard]] int32_t captured_rows() const;
  [[nodiscard]] int32_t captured_first() const;
  // Copies a row; returns vocab_size, or 0 if there is no such row. Copies nothing if capacity is smaller.
  size_t read_captured(int32_t row, float* buffer, size_t capacity) const;
  // Router gap of a captured row; false if there is no such row.
  bool router_gap(int32_t row, float* gap) const;

 private:
  void read_text(std::unique_lock<std::mutex>& lock, size_t tokens_end, TextTarget& text);
  mutable std::mutex mutex_;
  std::condition_variable ready_;
  std::pmr::vector<int32_t> tokens_;
  size_t num_text_tokens_ = 0;  // all but a stop token
  size_t num_read_ = 0;
  std::pmr::vector<TopLogprob> logprobs_;
  std::pmr::vector<float> captured_;
  std::pmr::vector<float> router_gaps_;
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
  std::shared_ptr<std::atomic<bool>> event_taken_;  // false while a kTokens event waits in the queue
};

}  // namespace moelora
