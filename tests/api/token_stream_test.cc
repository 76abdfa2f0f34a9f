// SPDX-License-Identifier: Apache-2.0
// TokenStream and CompletionQueue by themselves: order, ends, waking, and that emitting takes no memory.
#include "runtime/engine/token_stream.h"

#include <poll.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <thread>

#include "runtime/memory/host_memory.h"
#include "tests/support/catch.h"

using namespace moelora;

namespace {

std::atomic<long> num_allocations{0};

void* counted(void*, size_t size, size_t alignment) {
  ++num_allocations;
  return std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}
void release(void*, void* memory, size_t, size_t) {
  std::free(memory);
}

// Before any other test of this program takes memory.
const bool allocator_was_set = set_host_allocator({counted, release, nullptr});

Request request_of(int32_t max_tokens, int32_t logprobs = -1, int32_t capture_from = -1) {
  Request request;
  request.prompt = {1, 2, 3};
  request.sampling.max_tokens = max_tokens;
  request.sampling.logprobs = logprobs;
  request.capture_from = capture_from;
  return request;
}

bool readable(int fd) {
  pollfd entry = {fd, POLLIN, 0};
  return poll(&entry, 1, 0) == 1;
}

}  // namespace

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which own the allocator
void* operator new(size_t size) {
  ++num_allocations;
  if (void* memory = std::malloc(size)) {
    return memory;
  }
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}
#endif

TEST_CASE("tokens come out in order, then the end, which is sticky") {
  TokenStream stream(request_of(5), 10, nullptr, 1, 0);
  int32_t tokens[8];
  size_t n = 9;
  CHECK(stream.read(0, tokens, 8, &n) == Status::kTimeout);
  CHECK(n == 0);
  for (int32_t i = 0; i < 5; ++i) {
    stream.emit(10 + i, nullptr, 0);
  }
  CHECK(stream.unread() == 5);
  CHECK(stream.read(-1, tokens, 2, &n) == Status::kOk);
  CHECK(n == 2);
  CHECK(tokens[1] == 11);
  RequestResult result;
  result.finish = FinishReason::kLength;
  stream.finish(result);
  result.finish = FinishReason::kError;
  stream.finish(result);  // only the first counts
  CHECK(stream.finished());
  CHECK(stream.read(-1, tokens, 8, &n) == Status::kOk);
  CHECK(n == 3);
  CHECK(tokens[2] == 14);
  CHECK(stream.num_read() == 5);
  CHECK(stream.read(-1, tokens, 8, &n) == Status::kEnd);
  CHECK(stream.read(-1, tokens, 8, &n) == Status::kEnd);
  CHECK(stream.result().finish == FinishReason::kLength);
}

TEST_CASE("emitting, capturing and ending take no memory") {
  REQUIRE(allocator_was_set);
  REQUIRE(host_memory() != nullptr);
  constexpr int32_t kTokens = 300;
  constexpr int32_t kVocab = 50;
  auto queue = std::make_shared<CompletionQueue>();
  std::vector<std::unique_ptr<TokenStream>> streams;
  for (uint64_t i = 0; i < 20; ++i) {  // more events than the queue starts with
    streams.push_back(std::make_unique<TokenStream>(request_of(kTokens, 2, 1), kVocab, queue, i + 1, i));
  }
  const std::vector<float> logits(kVocab, 0.5f);
  const TopLogprob entries[3] = {{0, 1, -1.0f, 1}, {0, 1, -1.0f, 1}, {0, 2, -2.0f, 2}};
  RequestResult result;
  result.message = std::string(300, 'x');
  Event events[4];
  bool closed = false;
  const long before = num_allocations;
  for (int32_t t = 0; t < kTokens; ++t) {
    for (const auto& stream : streams) {
      stream->emit(t, entries, 3);
      stream->capture(t + 1, logits.data(), 0.5f);
    }
    if (t % 7 == 0) {
      queue->wait(0, events, 4, &closed);
    }
  }
  for (const auto& stream : streams) {
    stream->finish(result);
  }
  CHECK(num_allocations == before);
  CHECK(streams[3]->captured_rows() == kTokens);
  CHECK(streams[3]->captured_first() == 1);
  float gap = 0;
  CHECK(streams[3]->router_gap(kTokens - 1, &gap));
  CHECK(gap == 0.5f);
  CHECK_FALSE(streams[3]->router_gap(kTokens, &gap));
}

TEST_CASE("one tokens event a stream at a time, and the end after it") {
  auto queue = std::make_shared<CompletionQueue>();
  TokenStream stream(request_of(10), 10, queue, 77, 5);
  CHECK(!readable(queue->fd()));
  for (int i = 0; i < 4; ++i) {
    stream.emit(i, nullptr, 0);
  }
  CHECK(readable(queue->fd()));
  Event events[8];
  bool closed = true;
  CHECK(queue->wait(0, events, 8, &closed) == 1);
  CHECK(!closed);
  CHECK(events[0].kind == EventKind::kTokens);
  CHECK(events[0].handle == 77);
  CHECK(events[0].tag == 5);
  CHECK(!readable(queue->fd()));
  stream.emit(4, nullptr, 0);
  stream.finish({});
  CHECK(queue->wait(0, events, 8, &closed) == 2);
  CHECK(events[0].kind == EventKind::kTokens);
  CHECK(events[1].kind == EventKind::kFinished);
  CHECK(queue->wait(0, events, 8, &closed) == 0);
}

TEST_CASE("the ring keeps its order through growth and wrapping") {
  CompletionQueue queue;
  Event events[16];
  bool closed = false;
  uint64_t next = 0;
  uint64_t expected = 0;
  for (int round = 0; round < 50; ++round) {
    for (int i = 0; i < 7; ++i) {
      queue.push({EventKind::kAdapterReady, Status::kOk, ++next, 0});
    }
    const size_t n = queue.wait(0, events, 5, &closed);
    REQUIRE(n == 5);
    for (size_t i = 0; i < n; ++i) {
      REQUIRE(events[i].handle == ++expected);
    }
  }
  size_t n;
  while ((n = queue.wait(0, events, 16, &closed)) > 0) {
    for (size_t i = 0; i < n; ++i) {
      REQUIRE(events[i].handle == ++expected);
    }
  }
  CHECK(expected == next);
  CHECK(!readable(queue.fd()));
}

TEST_CASE("closing the reader or the queue wakes whoever waits, and stops the events") {
  auto queue = std::make_shared<CompletionQueue>();
  TokenStream stream(request_of(10), 10, queue, 1, 0);
  std::atomic<int> status{99};
  std::thread reader([&] {
    int32_t token;
    size_t n;
    status = static_cast<int>(stream.read(-1, &token, 1, &n));
  });
  int32_t token;
  size_t n;
  while (stream.read(0, &token, 1, &n) != Status::kBusy) {
    std::this_thread::yield();
  }
  stream.close_reader();
  reader.join();
  CHECK(status == static_cast<int>(Status::kClosed));
  stream.emit(1, nullptr, 0);
  stream.finish({});
  Event events[4];
  bool closed = false;
  CHECK(queue->wait(0, events, 4, &closed) == 0);

  std::atomic<bool> woken{false};
  std::thread waiter([&] {
    Event event;
    bool now_closed = false;
    while (!now_closed) {
      queue->wait(-1, &event, 1, &now_closed);
    }
    woken = true;
  });
  queue->close();
  waiter.join();
  CHECK(woken);
  CHECK(readable(queue->fd()));
  queue->push({});
  CHECK(queue->wait(0, events, 4, &closed) == 0);
  CHECK(closed);
}
