// SPDX-License-Identifier: Apache-2.0
// Small ways to drive an Engine from a test: submit a request, read it to its end.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "runtime/engine/engine.h"
#include "tests/support/catch.h"
#include "tests/support/comes_true.h"
#include "tests/support/golden.h"
#include "tests/support/test_device.h"

namespace moelora::test {

// With MOELORA_TEST_BESIDE in the environment the engines of these tests take the CPU for a device that works beside
// the host, as a GPU does.
inline EngineOptions test_options(EngineOptions options = {}) {
  if (std::getenv("MOELORA_TEST_BESIDE") != nullptr) {
    options.wrap_device = TestDevice::wrapper(std::make_shared<TestDevice::Plan>());
  }
  return options;
}

inline std::shared_ptr<Submission> make_submission(const Engine& engine, const Request& request) {
  auto submission = std::make_shared<Submission>();
  submission->request = request;
  submission->stream = std::make_unique<TokenStream>(request, engine.info().config.vocab_size, nullptr, 1, 0);
  return submission;
}

inline std::vector<int32_t> read_all(Submission& submission, RequestResult* result = nullptr) {
  std::vector<int32_t> tokens;
  for (;;) {
    int32_t buffer[64];
    size_t count = 0;
    const Status status = submission.stream->read(20000, buffer, 64, &count);
    if (status == Status::kOk) {
      tokens.insert(tokens.end(), buffer, buffer + count);
      continue;
    }
    if (status != Status::kEnd) {
      FAIL("read ended with status " << static_cast<int>(status));
    }
    break;
  }
  if (result != nullptr) {
    *result = submission.stream->result();
  }
  return tokens;
}

// Of requests that an engine was released under.
inline void check_ended_or_closed(const std::vector<std::shared_ptr<Submission>>& submissions) {
  for (const auto& submission : submissions) {
    RequestResult result;
    read_all(*submission, &result);
    CHECK((result.status == Status::kClosed || result.status == Status::kOk));
  }
}

inline std::vector<float> captured(const Submission& submission, int32_t vocab_size) {
  std::vector<float> logits(static_cast<size_t>(submission.stream->captured_rows()) * static_cast<size_t>(vocab_size));
  for (int32_t row = 0; row < submission.stream->captured_rows(); ++row) {
    submission.stream->read_captured(row, logits.data() + static_cast<size_t>(row) * static_cast<size_t>(vocab_size),
                                     static_cast<size_t>(vocab_size));
  }
  return logits;
}

// max|got - expected| / max|expected| of one row; a NaN sticks.
inline double row_error(const float* got, const float* expected, size_t vocab) {
  double error = 0;
  double largest = 0;
  for (size_t i = 0; i < vocab; ++i) {
    const double difference = std::abs(static_cast<double>(got[i]) - static_cast<double>(expected[i]));
    error = difference <= error ? error : difference;
    largest = std::max(largest, std::abs(static_cast<double>(expected[i])));
  }
  return error / largest;
}

// All captured rows of a request for one token.
inline std::vector<float> logits_of(Engine& engine, Request request) {
  request.sampling.max_tokens = 1;
  const auto submission = make_submission(engine, request);
  engine.submit(submission);
  read_all(*submission);
  return captured(*submission, engine.info().config.vocab_size);
}

// The same over whole captures of one size.
inline double difference(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  REQUIRE(!a.empty());
  return row_error(a.data(), b.data(), a.size());
}

inline std::shared_ptr<Adapter> load_adapter(Engine& engine, const std::string& dir, const std::string& name) {
  return engine.register_adapter(name, load_adapter_dir(dir, engine.info().config, engine.adapter_load_options()), 1.0f,
                                 false);
}

// Goes on to `max_tokens` whatever comes.
inline Request greedy_request(std::vector<int32_t> prompt, int32_t max_tokens) {
  Request request;
  request.prompt = std::move(prompt);
  request.sampling.max_tokens = max_tokens;
  request.sampling.ignore_eos = true;
  return request;
}

inline std::vector<int32_t> random_prompt(std::mt19937& random, size_t length, int32_t vocab) {
  std::vector<int32_t> prompt(length);
  for (int32_t& token : prompt) {
    token = static_cast<int32_t>(random() % static_cast<unsigned>(vocab));
  }
  return prompt;
}

struct Answer {
  std::vector<int32_t> tokens;
  std::vector<float> logits;
  bool operator==(const Answer& other) const { return tokens == other.tokens && logits == other.logits; }
};

inline Request batch_request(const std::vector<int32_t>& prompt, const std::shared_ptr<Adapter>& adapter,
                             float scale = 1.0f) {
  Request request;
  request.prompt = prompt;
  request.adapter = adapter;
  request.scale = scale;
  request.capture_from = 0;
  request.sampling.max_tokens = 9;
  request.sampling.ignore_eos = true;
  return request;
}

inline std::vector<Answer> answers(Engine& engine, const std::vector<Request>& requests) {
  std::vector<std::shared_ptr<Submission>> submissions;
  for (const Request& request : requests) {
    submissions.push_back(make_submission(engine, request));
  }
  std::vector<Error> errors;
  engine.submit_batch(submissions, &errors);
  std::vector<Answer> result;
  for (size_t i = 0; i < submissions.size(); ++i) {
    REQUIRE(errors[i].status() == Status::kOk);
    Answer answer;
    answer.tokens = read_all(*submissions[i]);
    answer.logits = captured(*submissions[i], engine.info().config.vocab_size);
    result.push_back(std::move(answer));
  }
  return result;
}

}  // namespace moelora::test
