// SPDX-License-Identifier: Apache-2.0
// How requests end, and what else comes out of them, through the public API: cancelling, deadlines, readers that do
// not read, logprobs, captured logits, the blocking calls.
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "tests/api/host.h"
#include "tests/support/comes_true.h"

using namespace moelora_host;

namespace {

const std::vector<int32_t> kPrompt = {52, 20, 29, 93, 163, 281, 246};

}  // namespace

TEST_CASE("cancel, and the next request") {
  Options options;
  options.output_buffer_tokens = 2;  // nobody reads: it pauses early and is surely alive when cancelled
  const Host host(options);
  Err err;
  const moelora_request request = host.submit(kPrompt, 400);
  CHECK(moelora_request_cancel(host.engine, request, 8, err) == MOELORA_E_INVALID);
  CHECK(moelora_request_cancel(host.engine, request, 0, err) == MOELORA_OK);
  const std::vector<int32_t> tokens = host.read_all(request);
  CHECK(tokens.size() < 400);
  moelora_result result;
  moelora_result_init(&result);
  REQUIRE(moelora_request_result(host.engine, request, &result, err) == MOELORA_OK);
  CHECK(result.finish_reason == MOELORA_FINISH_CANCELLED);
  for (int i = 0; i < 1000; ++i) {
    CHECK(moelora_request_cancel(host.engine, request, 0, err) == MOELORA_ALREADY_DONE);
  }
  CHECK(host.answer(kPrompt, 8).size() == 8);
}

TEST_CASE("a deadline ends a request") {
  Options options;
  options.output_buffer_tokens = 2;
  const Host host(options);
  Err err;
  const moelora_request request = host.build(kPrompt, 400);
  REQUIRE(moelora_request_set_deadline(host.engine, request, 50, err) == MOELORA_OK);
  REQUIRE(moelora_request_submit(host.engine, request, err) == MOELORA_OK);
  int32_t token = 0;
  moelora_result result;
  moelora_result_init(&result);
  moelora_status status = MOELORA_E_BUSY;
  moelora::test::comes_true([&] {
    status = moelora_request_result(host.engine, request, &result, err);
    return status != MOELORA_E_BUSY;
  });
  REQUIRE(status == MOELORA_OK);
  CHECK(result.finish_reason == MOELORA_FINISH_DEADLINE);
  while ((status = moelora_request_read(host.engine, request, 0, &token, 1, nullptr, 0, nullptr, err)) == MOELORA_OK) {
  }
  CHECK(status == MOELORA_END);
}

TEST_CASE("a reader that does not read: pause, or an error that read returns for ever") {
  Options options;
  options.output_buffer_tokens = 4;
  options.overrun = "fail";
  const Host host(options);
  Err err;
  const moelora_request request = host.submit(kPrompt, 64);
  moelora_result result;
  moelora_result_init(&result);
  moelora_status status = MOELORA_E_BUSY;
  moelora::test::comes_true([&] {
    status = moelora_request_result(host.engine, request, &result, err);
    return status != MOELORA_E_BUSY;
  });
  REQUIRE(status == MOELORA_OK);
  CHECK(result.finish_reason == MOELORA_FINISH_ERROR);
  CHECK(result.status == MOELORA_E_OVERRUN);
  int32_t token = 0;
  int read = 0;
  while ((status = moelora_request_read(host.engine, request, 0, &token, 1, nullptr, 0, nullptr, err)) == MOELORA_OK) {
    ++read;
  }
  CHECK(read >= 4);
  CHECK(status == MOELORA_E_OVERRUN);
  CHECK((err.error.flags & MOELORA_ERROR_FATAL_REQUEST) != 0);
  CHECK(moelora_request_read(host.engine, request, -1, &token, 1, nullptr, 0, nullptr, err) == MOELORA_E_OVERRUN);
}

TEST_CASE("logprobs by position, and captured logits") {
  const Host host;
  Err err;
  const moelora_request request = host.build(kPrompt, 5);
  moelora_sampling sampling = greedy(5);
  sampling.logprobs = 3;
  REQUIRE(moelora_request_set_sampling(host.engine, request, &sampling, err) == MOELORA_OK);
  REQUIRE(moelora_request_capture_logits(host.engine, request, 4, err) == MOELORA_OK);
  REQUIRE(moelora_request_submit(host.engine, request, err) == MOELORA_OK);
  const std::vector<int32_t> tokens = host.read_all(request);
  size_t n = 0;
  CHECK(moelora_request_read_logprobs(host.engine, request, 0, 5, nullptr, 0, &n, err) == MOELORA_MORE);
  CHECK(n == 5 * 4);
  std::vector<moelora_logprob> entries(n);
  REQUIRE(moelora_request_read_logprobs(host.engine, request, 0, 5, entries.data(), n, &n, err) == MOELORA_OK);
  int32_t rows = 0, first = 0, vocab = 0;
  REQUIRE(moelora_request_captured(host.engine, request, &rows, &first, &vocab, err) == MOELORA_OK);
  CHECK(first == 4);
  CHECK(vocab == 320);
  CHECK(rows >= 3 + 4);  // prompt positions 4, 5, 6 and the outputs but the last
  std::vector<float> logits(320);
  for (size_t i = 0; i < 5; ++i) {
    const moelora_logprob& own = entries[4 * i];
    CHECK(own.position == static_cast<int32_t>(i));
    CHECK(own.token == tokens[i]);
    CHECK(own.rank == 1);
    CHECK(entries[4 * i + 1].token == tokens[i]);
    CHECK(entries[4 * i + 1].logprob >= entries[4 * i + 2].logprob);
    // Row i + 2 predicts output i: the softmax in double must say the same.
    REQUIRE(moelora_request_read_captured(host.engine, request, static_cast<int32_t>(i) + 2, logits.data(), 320, err) ==
            MOELORA_OK);
    const auto best = std::max_element(logits.begin(), logits.end());
    CHECK(best - logits.begin() == tokens[i]);
    double sum = 0;
    for (const float logit : logits) {
      sum += std::exp(static_cast<double>(logit) - *best);
    }
    CHECK(std::fabs(-std::log(sum) - own.logprob) < 1e-4);
  }
  CHECK(moelora_request_read_captured(host.engine, request, rows, logits.data(), 320, err) == MOELORA_E_INVALID);
  CHECK(moelora_request_read_captured(host.engine, request, 0, logits.data(), 319, err) == MOELORA_MORE);
  float gap = -1;
  REQUIRE(moelora_request_router_gap(host.engine, request, 0, &gap, err) == MOELORA_OK);
  CHECK(gap >= 0.0f);
  CHECK(moelora_request_router_gap(host.engine, request, rows, &gap, err) == MOELORA_E_INVALID);
  CHECK(moelora_request_router_gap(host.engine, request, 0, nullptr, err) == MOELORA_E_INVALID);
  CHECK(moelora_request_read_logprobs(host.engine, request, 3, 100, entries.data(), 20, &n, err) == MOELORA_OK);
  CHECK(n == 8);
  CHECK(moelora_request_read_logprobs(host.engine, request, -1, 1, entries.data(), 20, &n, err) == MOELORA_E_INVALID);
}

TEST_CASE("generate_tokens checks its buffers") {
  const Host host;
  Err err;
  int32_t tokens[16];
  size_t n = 0;
  moelora_sampling sampling = greedy(16);
  const auto generate = [&](size_t cap, moelora_result* result) {
    return moelora_generate_tokens(host.engine, 0, 1.0f, kPrompt.data(), kPrompt.size(), &sampling, tokens, cap, &n,
                                   result, err);
  };
  CHECK(generate(15, nullptr) == MOELORA_E_INVALID);
  CHECK(err.names("max_tokens = 16"));
  moelora_result result;
  moelora_result_init(&result);
  CHECK(generate(16, &result) == MOELORA_OK);
  CHECK(n == 16);
  CHECK(result.output_tokens == 16);
  result.struct_size = 3;
  CHECK(generate(16, &result) == MOELORA_E_STRUCT_SIZE);
  CHECK(moelora_generate_tokens(host.engine, 99, 1.0f, kPrompt.data(), 7, nullptr, tokens, 16, &n, nullptr, err) ==
        MOELORA_E_HANDLE);
  CHECK(moelora_generate_tokens(host.engine, 0, std::strtof("inf", nullptr), kPrompt.data(), 7, nullptr, tokens, 16, &n,
                                nullptr, err) == MOELORA_E_INVALID);
  char text[8];
  CHECK(moelora_generate(host.engine, 0, 1.0f, "hi", 2, nullptr, text, 8, &n, nullptr, err) == MOELORA_E_UNSUPPORTED);
  const moelora_request request = host.build(kPrompt, 2);
  CHECK(moelora_request_set_text(host.engine, request, "hi", 2, err) == MOELORA_E_UNSUPPORTED);
  CHECK(moelora_request_add_stop(host.engine, request, "hi", 2, err) == MOELORA_E_UNSUPPORTED);
  CHECK(err.names("no tokenizer"));
}
