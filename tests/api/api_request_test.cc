// SPDX-License-Identifier: Apache-2.0
// Requests through the public API: building, refusing, submitting, reading, queues.
#include <fcntl.h>
#include <poll.h>

#include <algorithm>
#include <cstdlib>
#include <map>

#include "tests/api/host.h"

using namespace moelora_host;

namespace {

const std::vector<int32_t> kPrompt = {52, 20, 29, 93, 163, 281, 246};

bool readable(int fd) {
  pollfd entry = {fd, POLLIN, 0};
  return poll(&entry, 1, 0) == 1;
}

}  // namespace

TEST_CASE("answers are the reference's, one at a time and mixed in one batch over a queue") {
  const Host host;
  std::map<uint64_t, Reference> expected;  // by tag
  std::map<uint64_t, moelora_adapter> adapters = {{1, 0}};
  expected[1] = reference("", 7);
  uint64_t tag = 1;
  for (const char* name : {"attn", "experts", "attn_experts", "rslora"}) {
    expected[++tag] = reference(name, 7);
    adapters[tag] = host.load(name);
  }
  // The first tokens; later ones may hang on a near tie.
  const auto head = [](std::vector<int32_t> tokens) {
    tokens.resize(std::min<size_t>(tokens.size(), 3));
    return tokens;
  };
  for (const auto& [id, entry] : expected) {
    CHECK(head(host.answer(entry.prompt, 8, adapters[id])) == head(entry.greedy));
  }

  moelora_queue* queue = nullptr;
  Err err;
  REQUIRE(moelora_queue_create(&queue, err) == MOELORA_OK);
  int fd = -1;
  REQUIRE(moelora_queue_fd(queue, &fd, err) == MOELORA_OK);
  CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
  CHECK((fcntl(fd, F_GETFL) & O_NONBLOCK) != 0);
  CHECK(!readable(fd));
  std::vector<moelora_request> requests;
  std::map<moelora_request, uint64_t> tags;
  for (const auto& [id, entry] : expected) {
    requests.push_back(host.build(entry.prompt, 8, adapters[id]));
    tags[requests.back()] = id;
    REQUIRE(moelora_request_set_queue(host.engine, requests.back(), queue, id, err) == MOELORA_OK);
  }
  std::vector<moelora_status> each(requests.size(), 99);
  REQUIRE(moelora_submit_batch(host.engine, requests.data(), requests.size(), each.data(), err) == MOELORA_OK);
  CHECK(std::count(each.begin(), each.end(), MOELORA_OK) == static_cast<long>(each.size()));
  std::map<uint64_t, std::vector<int32_t>> got;
  size_t finished = 0;
  while (finished < requests.size()) {
    moelora_event events[4];
    size_t n = 0;
    pollfd entry = {fd, POLLIN, 0};
    REQUIRE(poll(&entry, 1, 60000) == 1);
    REQUIRE(moelora_queue_wait(queue, 0, events, 4, &n, err) == MOELORA_OK);
    for (size_t i = 0; i < n; ++i) {
      CHECK(tags.at(events[i].handle) == events[i].tag);
      if (events[i].kind == MOELORA_EVENT_FINISHED) {
        CHECK(events[i].status == MOELORA_OK);
        ++finished;
        continue;
      }
      CHECK(events[i].kind == MOELORA_EVENT_TOKENS);
      int32_t token = 0;
      while (moelora_request_read(host.engine, events[i].handle, 0, &token, 1, nullptr, 0, nullptr, err) ==
             MOELORA_OK) {
        got[events[i].tag].push_back(token);
      }
    }
  }
  CHECK(!readable(fd));
  for (const auto& [id, entry] : expected) {
    CHECK(got[id].size() == 8);
    CHECK(head(got[id]) == head(entry.greedy));
  }
  for (const moelora_request request : requests) {
    CHECK(moelora_request_close(host.engine, request, err) == MOELORA_OK);
  }
  moelora_queue_destroy(queue);
}

TEST_CASE("reading in chunks, the end, the result") {
  const Host host;
  Err err;
  const moelora_request request = host.submit(kPrompt, 11);
  const std::vector<int32_t> tokens = host.read_all(request, 3);
  CHECK(tokens == host.answer(kPrompt, 11));
  CHECK(tokens.size() == 11);
  moelora_chunk chunk;
  moelora_chunk_init(&chunk);
  int32_t token = 0;
  for (int i = 0; i < 3; ++i) {  // sticky, at once, also when told to wait for ever
    CHECK(moelora_request_read(host.engine, request, -1, &token, 1, nullptr, 0, &chunk, err) == MOELORA_END);
    CHECK(chunk.num_tokens == 0);
    CHECK(chunk.first_position == 11);
  }
  moelora_result result;
  moelora_result_init(&result);
  REQUIRE(moelora_request_result(host.engine, request, &result, err) == MOELORA_OK);
  CHECK(result.finish_reason == MOELORA_FINISH_LENGTH);
  CHECK(result.status == MOELORA_OK);
  CHECK(result.prompt_tokens == 7);
  CHECK(result.output_tokens == 11);
  CHECK(result.stop_index == -1);
  CHECK(result.seed != 0);
  CHECK(result.first_token_ms > 0);
  CHECK(moelora_request_cancel(host.engine, request, 0, err) == MOELORA_ALREADY_DONE);
  CHECK(moelora_request_close(host.engine, request, err) == MOELORA_OK);
  CHECK(moelora_request_close(host.engine, request, err) == MOELORA_E_HANDLE);
  CHECK(moelora_request_cancel(host.engine, request, 0, err) == MOELORA_E_HANDLE);
  CHECK(moelora_request_read(host.engine, request, 0, &token, 1, nullptr, 0, nullptr, err) == MOELORA_E_HANDLE);
  CHECK(moelora_request_close(host.engine, 0, err) == MOELORA_OK);
}

TEST_CASE("stop tokens: delivered, and named in the result") {
  const Host host;
  Err err;
  const std::vector<int32_t> tokens = host.answer(kPrompt, 6);
  const moelora_request request = host.build(kPrompt, 6);
  REQUIRE(moelora_request_add_stop_token(host.engine, request, 319, err) == MOELORA_OK);
  REQUIRE(moelora_request_add_stop_token(host.engine, request, tokens[2], err) == MOELORA_OK);
  CHECK(moelora_request_add_stop_token(host.engine, request, 320, err) == MOELORA_E_INVALID);
  CHECK(err.names("320"));
  REQUIRE(moelora_request_submit(host.engine, request, err) == MOELORA_OK);
  CHECK(host.read_all(request) == std::vector<int32_t>(tokens.begin(), tokens.begin() + 3));
  moelora_result result;
  moelora_result_init(&result);
  REQUIRE(moelora_request_result(host.engine, request, &result, err) == MOELORA_OK);
  CHECK(result.finish_reason == MOELORA_FINISH_STOP);
  CHECK(result.stop_index == 1);
}

TEST_CASE("bad requests are refused by name, stay builders, and the engine goes on") {
  const Host host;
  Err err;
  const auto submit = [&](moelora_request request) { return moelora_request_submit(host.engine, request, err); };
  const moelora_request request = host.build({}, 4);
  CHECK(submit(request) == MOELORA_E_INVALID);
  CHECK(err.names("empty"));
  const std::vector<int32_t> outside = {1, 320};
  REQUIRE(moelora_request_set_tokens(host.engine, request, outside.data(), 2, err) == MOELORA_OK);
  CHECK(submit(request) == MOELORA_E_INVALID);
  CHECK(err.names("320"));
  const std::vector<int32_t> negative = {-1};
  REQUIRE(moelora_request_set_tokens(host.engine, request, negative.data(), 1, err) == MOELORA_OK);
  CHECK(submit(request) == MOELORA_E_INVALID);
  const std::vector<int32_t> whole(512, 5);
  REQUIRE(moelora_request_set_tokens(host.engine, request, whole.data(), 512, err) == MOELORA_OK);
  CHECK(submit(request) == MOELORA_E_CONTEXT_LENGTH);
  CHECK(err.names("512"));
  // Refused without touching the memory that it names.
  CHECK(moelora_request_set_tokens(host.engine, request, whole.data(), size_t{1} << 40, err) ==
        MOELORA_E_CONTEXT_LENGTH);
  CHECK(moelora_request_set_tokens(host.engine, request, nullptr, 3, err) == MOELORA_E_INVALID);
  CHECK(moelora_request_set_tokens(host.engine, request, nullptr, 0, err) == MOELORA_OK);

  REQUIRE(moelora_request_set_tokens(host.engine, request, kPrompt.data(), kPrompt.size(), err) == MOELORA_OK);
  moelora_sampling sampling = greedy(4);
  sampling.n = 2;
  CHECK(moelora_request_set_sampling(host.engine, request, &sampling, err) == MOELORA_E_UNSUPPORTED);
  CHECK(err.names("n = 2"));
  sampling = greedy(4);
  sampling.flags |= 64;
  CHECK(moelora_request_set_sampling(host.engine, request, &sampling, err) == MOELORA_E_INVALID);
  sampling = greedy(4);
  sampling.struct_size = 0;
  CHECK(moelora_request_set_sampling(host.engine, request, &sampling, err) == MOELORA_E_STRUCT_SIZE);
  CHECK(moelora_request_set_sampling(host.engine, request, nullptr, err) == MOELORA_E_INVALID);
  struct Bad {
    const char* name;
    void (*change)(moelora_sampling&);
  };
  for (const Bad& bad : {Bad{"temperature", [](moelora_sampling& s) { s.temperature = -1; }},
                         Bad{"top_p", [](moelora_sampling& s) { s.top_p = 1.5f; }},
                         Bad{"min_p", [](moelora_sampling& s) { s.min_p = std::strtof("nan", nullptr); }},
                         Bad{"top_k", [](moelora_sampling& s) { s.top_k = -3; }},
                         Bad{"max_tokens", [](moelora_sampling& s) { s.max_tokens = 0; }},
                         Bad{"min_tokens", [](moelora_sampling& s) { s.min_tokens = 9; }},
                         Bad{"logprobs", [](moelora_sampling& s) { s.logprobs = 1000000; }},
                         Bad{"repetition_penalty", [](moelora_sampling& s) { s.repetition_penalty = 0; }}}) {
    INFO(bad.name);
    sampling = greedy(4);
    bad.change(sampling);
    CHECK(moelora_request_set_sampling(host.engine, request, &sampling, err) == MOELORA_OK);
    CHECK(submit(request) == MOELORA_E_INVALID);
    CHECK(err.names(bad.name));
  }
  sampling = greedy(4);
  REQUIRE(moelora_request_set_sampling(host.engine, request, &sampling, err) == MOELORA_OK);
  REQUIRE(submit(request) == MOELORA_OK);
  CHECK(submit(request) == MOELORA_E_INVALID);
  CHECK(moelora_request_set_priority(host.engine, request, 3, err) == MOELORA_E_INVALID);
  CHECK(host.read_all(request) == host.answer(kPrompt, 4));
}

TEST_CASE("reading before submit, and wrong buffers") {
  const Host host;
  Err err;
  const moelora_request request = host.build(kPrompt, 4);
  int32_t tokens[4];
  char text[4];
  moelora_chunk chunk;
  moelora_chunk_init(&chunk);
  moelora_result result;
  moelora_result_init(&result);
  CHECK(moelora_request_read(host.engine, request, 0, tokens, 4, nullptr, 0, &chunk, err) == MOELORA_E_INVALID);
  CHECK(moelora_request_result(host.engine, request, &result, err) == MOELORA_E_INVALID);
  CHECK(moelora_request_cancel(host.engine, request, 0, err) == MOELORA_ALREADY_DONE);
  CHECK(moelora_request_read(host.engine, request, 0, tokens, 0, nullptr, 0, &chunk, err) == MOELORA_E_INVALID);
  CHECK(moelora_request_read(host.engine, request, 0, nullptr, 4, nullptr, 0, &chunk, err) == MOELORA_E_INVALID);
  CHECK(moelora_request_read(host.engine, request, 0, tokens, 4, nullptr, 0, nullptr, err) == MOELORA_E_INVALID);
  CHECK(moelora_request_read(host.engine, request, 0, tokens, 4, text, 4, &chunk, err) == MOELORA_E_UNSUPPORTED);
  CHECK(err.names("no tokenizer"));
  chunk.struct_size = 4;
  CHECK(moelora_request_read(host.engine, request, 0, tokens, 4, nullptr, 0, &chunk, err) == MOELORA_E_STRUCT_SIZE);
}

TEST_CASE("a batch: every status, the others run") {
  const Host host;
  Err err;
  const moelora_request good = host.build(kPrompt, 3);
  const moelora_request empty = host.build({}, 3);
  const moelora_request also_good = host.build({5}, 3);
  const std::vector<moelora_request> requests = {good, empty, 12345, also_good, good};
  std::vector<moelora_status> each(requests.size(), 99);
  CHECK(moelora_submit_batch(host.engine, requests.data(), requests.size(), each.data(), err) == MOELORA_E_INVALID);
  CHECK(err.names("request 1 of 5"));
  CHECK(each ==
        std::vector<moelora_status>{MOELORA_OK, MOELORA_E_INVALID, MOELORA_E_HANDLE, MOELORA_OK, MOELORA_E_INVALID});
  CHECK(host.read_all(good).size() == 3);
  CHECK(host.read_all(also_good).size() == 3);
  CHECK(moelora_submit_batch(host.engine, nullptr, 0, nullptr, err) == MOELORA_OK);
}

TEST_CASE("a full queue of requests is retriable") {
  Options options;
  options.max_num_sequences = 1;
  options.max_queued_requests = 2;
  options.output_buffer_tokens = 1;
  const Host host(options);
  Err err;
  std::vector<moelora_request> accepted;
  moelora_request refused = 0;
  while (refused == 0 && accepted.size() < 10) {
    const moelora_request request = host.build(kPrompt, 8);
    const moelora_status status = moelora_request_submit(host.engine, request, err);
    if (status == MOELORA_OK) {
      accepted.push_back(request);
    } else {
      CHECK(status == MOELORA_E_OVERLOADED);
      CHECK((err.error.flags & MOELORA_ERROR_RETRIABLE) != 0);
      CHECK(err.names("max_queued_requests"));
      refused = request;
    }
  }
  REQUIRE(refused != 0);
  CHECK(accepted.size() >= 2);
  for (const moelora_request request : accepted) {
    CHECK(host.read_all(request, 1).size() == 8);
  }
  CHECK(moelora_request_submit(host.engine, refused, err) == MOELORA_OK);
  CHECK(host.read_all(refused).size() == 8);
}
