// SPDX-License-Identifier: Apache-2.0
#include "runtime/engine/token_stream.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "kernels/sampling/sample_tokens.h"
#include "runtime/io/utf8.h"
#include "runtime/memory/host_memory.h"

namespace moelora {
namespace {

// A timeout from now on; the monotonic clock, so that clock jumps do no harm.
struct Timeout {
  explicit Timeout(int32_t ms) : polls(ms == 0), ends(ms >= 0) {
    if (ends) {
      end = std::chrono::steady_clock::now() + std::chrono::milliseconds(ms);
    }
  }
  bool polls, ends;
  std::chrono::steady_clock::time_point end;
};

// Waits on `ready` until `done()` or the timeout.
template <class Predicate>
bool wait_until_done(std::condition_variable& ready, std::unique_lock<std::mutex>& lock, const Timeout& timeout,
                     const Predicate& done) {
  if (timeout.polls) {
    return done();
  }
  if (!timeout.ends) {
    ready.wait(lock, done);
    return true;
  }
  return ready.wait_until(lock, timeout.end, done);
}

}  // namespace

CompletionQueue::CompletionQueue() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (fd_ < 0) {
    throw Error(Status::kIo, std::string("eventfd of a queue: ") + std::strerror(errno));
  }
  grow(16);
}

CompletionQueue::~CompletionQueue() {
  ::close(fd_);
}

void CompletionQueue::grow(size_t capacity) {
  if (capacity <= ring_.size()) {
    return;
  }
  std::vector<Slot> larger(std::max(capacity, 2 * ring_.size()));
  for (size_t i = 0; i < size_; ++i) {
    larger[i] = std::move(ring_[(first_ + i) % ring_.size()]);
  }
  ring_.swap(larger);
  first_ = 0;
}

void CompletionQueue::signal() {
  const uint64_t one = 1;
  // Can only fail with EAGAIN, at 2^64 - 2 unread signals; it is readable then too.
  [[maybe_unused]] const ssize_t written = ::write(fd_, &one, sizeof one);
}

void CompletionQueue::expect(int count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (count < 0) {
    expected_ -= std::min(expected_, static_cast<size_t>(-count));
    return;
  }
  // Events of streams that are gone still count through size_.
  grow(size_ + expected_ + static_cast<size_t>(count));
  expected_ += static_cast<size_t>(count);
}

void CompletionQueue::push(const Event& event, std::shared_ptr<std::atomic<bool>> taken) {
  const std::lock_guard<std::mutex> lock(mutex_);
  push_locked(event, std::move(taken));
}

void CompletionQueue::push_locked(const Event& event, std::shared_ptr<std::atomic<bool>> taken) {
  if (closed_) {
    return;
  }
  if (size_ == ring_.size()) {
    grow(size_ + 1);
  }
  Slot& slot = ring_[(first_ + size_) % ring_.size()];
  slot.event = event;
  slot.taken = std::move(taken);
  if ((event.kind == EventKind::kAdapterReady || event.kind == EventKind::kEngineFailed) && expected_ > 0) {
    --expected_;  // comes once
  }
  if (++size_ == 1) {
    signal();
  }
  ready_.notify_one();
}

size_t CompletionQueue::wait(int32_t timeout_ms, Event* events, size_t capacity, bool* closed) {
  std::unique_lock<std::mutex> lock(mutex_);
  wait_until_done(ready_, lock, Timeout(timeout_ms), [&] { return size_ > 0 || closed_; });
  *closed = closed_;
  if (closed_) {
    return 0;
  }
  const size_t count = std::min(capacity, size_);
  for (size_t i = 0; i < count; ++i) {
    Slot& slot = ring_[first_];
    events[i] = slot.event;
    if (slot.taken) {
      slot.taken->store(true);
    }
    slot.taken.reset();
    first_ = (first_ + 1) % ring_.size();
    --size_;
  }
  if (count > 0 && size_ == 0) {
    uint64_t drained;
    [[maybe_unused]] const ssize_t got = ::read(fd_, &drained, sizeof drained);
  } else if (size_ > 0) {
    ready_.notify_one();  // another waiter may take the rest
  }
  return count;
}

void CompletionQueue::wake() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < size_; ++i) {
    if (ring_[(first_ + i) % ring_.size()].event.kind == EventKind::kWake) {
      return;
    }
  }
  push_locked(Event{}, nullptr);
}

void CompletionQueue::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  for (Slot& slot : ring_) {
    slot.taken.reset();
  }
  size_ = 0;
  signal();  // a poller must notice
  ready_.notify_all();
}

TokenStream::TokenStream(const Request& request, int32_t vocab_size, std::shared_ptr<CompletionQueue> queue,
                         uint64_t handle, uint64_t tag, int64_t history_tokens)
    : tokens_(host_memory()),
      logprobs_(host_memory()),
      captured_(host_memory()),
      router_gaps_(host_memory()),
      vocab_size_(vocab_size),
      queue_(std::move(queue)),
      handle_(handle),
      tag_(tag) {
  const auto max_tokens = static_cast<size_t>(std::max(request.sampling.max_tokens, 0));
  tokens_.reserve(max_tokens);
  if (request.sampling.logprobs >= 0) {
    const int32_t best = std::min(request.sampling.logprobs, kMaxTopLogprobs);  // more is refused at submit
    logprobs_.reserve(max_tokens * (static_cast<size_t>(best) + 1));
  }
  if (request.capture_from >= 0) {
    const int64_t positions = history_tokens + static_cast<int64_t>(request.opening.size() + request.prompt.size()) +
                              static_cast<int64_t>(max_tokens);
    const int64_t rows = std::max<int64_t>(positions - request.capture_from, 0);
    captured_.reserve(static_cast<size_t>(rows) * static_cast<size_t>(vocab_size));
    router_gaps_.reserve(static_cast<size_t>(rows));
  }
  result_.message.reserve(512);
  if (queue_) {
    event_taken_ = std::make_shared<std::atomic<bool>>(true);
    queue_->expect(2);  // one kTokens, one kFinished
  }
}

TokenStream::~TokenStream() {
  if (queue_) {
    queue_->expect(-2);
  }
}

void TokenStream::emit(int32_t token, const TopLogprob* logprobs, size_t num_logprobs, bool in_text) {
  const std::lock_guard<std::mutex> lock(mutex_);
  tokens_.push_back(token);
  num_text_tokens_ += in_text ? 1 : 0;
  logprobs_.insert(logprobs_.end(), logprobs, logprobs + num_logprobs);
  ready_.notify_one();
  if (queue_ && !reader_closed_ && event_taken_->exchange(false)) {
    queue_->push({EventKind::kTokens, Status::kOk, handle_, tag_}, event_taken_);
  }
}

void TokenStream::capture(int32_t position, const float* logits, float router_gap) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (captured_rows_ == 0) {
    captured_first_ = position;
  } else if (position < captured_first_ + captured_rows_) {
    return;  // computed again after a preemption
  }
  if (position < captured_first_ + captured_rows_) {
    return;  // computed again after a preemption
  }
  captured_.insert(captured_.end(), logits, logits + vocab_size_);
  router_gaps_.push_back(router_gap);
  ++captured_rows_;
}

void TokenStream::finish(const RequestResult& result) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (finished_) {
    return;
  }
  result_ = result;
  finished_ = true;
  ready_.notify_all();
  if (queue_ && !reader_closed_) {
    queue_->push({EventKind::kFinished, result.status, handle_, tag_});
  }
}

size_t TokenStream::unread() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return tokens_.size() - num_read_;
}

Status TokenStream::read(int32_t timeout_ms, int32_t* tokens, size_t capacity, size_t* n, TextTarget* text) {
  *n = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  if (reader_closed_) {
    return Status::kClosed;
  }
  if (reading_) {
    return Status::kBusy;
  }
  reading_ = true;
  // Also reset when the waiting thread is cancelled (a forced unwind).
  struct Leave {
    bool& reading;
    ~Leave() { reading = false; }
  } leave{reading_};
  const auto text_end = [&] { return capacity == 0 ? num_text_tokens_ : std::min(num_read_, num_text_tokens_); };
  const Timeout timeout(timeout_ms);
  for (;;) {  // again where new tokens have given no text to a reader who wants nothing else
    const bool in_time = wait_until_done(ready_, lock, timeout, [&] {
      return reader_closed_ || finished_ || (capacity > 0 && tokens_.size() > num_read_) ||
             (text != nullptr && (!text->source.ready().empty() || text_end() > text->source.num_tokens()));
    });
    if (reader_closed_) {
      return Status::kClosed;
    }
    *n = std::min(capacity, tokens_.size() - num_read_);
    std::copy_n(tokens_.begin() + static_cast<ptrdiff_t>(num_read_), *n, tokens);
    num_read_ += *n;
    if (text != nullptr) {
      read_text(lock, capacity == 0 ? SIZE_MAX : num_read_, *text);
    }
    if (*n > 0 || (text != nullptr && text->n > 0)) {
      return Status::kOk;
    }
    const bool text_ended = text == nullptr || (text->source.finished() && text->source.ready().empty());
    if (finished_ && text_ended && num_read_ == tokens_.size()) {
      return Status::kEnd;
    }
    if (!in_time) {
      return Status::kTimeout;
    }
  }
}

// Decodes what is new of the first tokens_end tokens, without the lock, as far as there is room, and copies text.
void TokenStream::read_text(std::unique_lock<std::mutex>& lock, size_t tokens_end, TextTarget& text) {
  OutputText& source = text.source;
  size_t end = std::min(tokens_end, num_text_tokens_);
  while (source.ready().size() < text.capacity && source.num_tokens() < end) {
    int32_t some[64];
    const size_t count = std::min(std::size(some), end - source.num_tokens());
    std::copy_n(tokens_.begin() + static_cast<ptrdiff_t>(source.num_tokens()), count, some);
    struct Unlocked {
      std::unique_lock<std::mutex>& lock;
      explicit Unlocked(std::unique_lock<std::mutex>& held) : lock(held) { lock.unlock(); }
      ~Unlocked() { lock.lock(); }
    };
    {
      const Unlocked unlocked(lock);
      std::for_each_n(some, count, [&](int32_t token) { source.push(token); });
    }
    end = std::min(tokens_end, num_text_tokens_);
  }
  const bool all = source.num_tokens() == num_text_tokens_;
  if (finished_ && all) {
    source.finish();
  }
  if (tokens_end == SIZE_MAX) {  // tokens count as read with their text
    num_read_ = finished_ && all ? tokens_.size() : std::max(num_read_, source.num_tokens());
  }
  const std::string_view ready = source.ready();
  text.n = whole_code_points(ready, text.capacity);
  std::copy_n(ready.begin(), text.n, text.buffer);
  source.take(text.n);
}

void TokenStream::close_reader() {
  const std::lock_guard<std::mutex> lock(mutex_);
  reader_closed_ = true;
  ready_.notify_all();
}

bool TokenStream::finished() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return finished_;
}

size_t TokenStream::num_read() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_read_;
}

RequestResult TokenStream::result() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return result_;
}

size_t TokenStream::read_logprobs(int32_t first_position, int32_t num_positions, TopLogprob* buffer, size_t capacity,
                                  size_t* needed) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t last = static_cast<int64_t>(first_position) + num_positions;
  const auto begin = std::partition_point(logprobs_.begin(), logprobs_.end(),
                                          [&](const TopLogprob& entry) { return entry.position < first_position; });
  const auto end =
      std::partition_point(begin, logprobs_.end(), [&](const TopLogprob& entry) { return entry.position < last; });
  *needed = static_cast<size_t>(end - begin);
  if (*needed > capacity) {
    return 0;
  }
  std::copy(begin, end, buffer);
  return *needed;
}

int32_t TokenStream::captured_rows() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return captured_rows_;
}

int32_t TokenStream::captured_first() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return captured_first_;
}

size_t TokenStream::read_captured(int32_t row, float* buffer, size_t capacity) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (row < 0 || row >= captured_rows_) {
    return 0;
  }
  const auto width = static_cast<size_t>(vocab_size_);
  if (capacity < width) {
    return width;
  }
  std::copy_n(captured_.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(row) * width), width, buffer);
  return width;
}

bool TokenStream::router_gap(int32_t row, float* gap) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (row < 0 || row >= captured_rows_) {
    return false;
  }
  *gap = router_gaps_[static_cast<size_t>(row)];
  return true;
}

}  // namespace moelora
