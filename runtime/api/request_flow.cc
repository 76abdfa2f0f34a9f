// SPDX-License-Identifier: Apache-2.0
#include "runtime/api/request_flow.h"

#include <algorithm>
#include <utility>

#include "runtime/api/boundary.h"

namespace moelora::api {
namespace {

using State = RequestObject::State;

// kBuilding -> kSubmitting with a Submission of its own, so that events and readers find it from the first token on.
std::shared_ptr<Submission> begin_submit(const EngineObject& object, RequestObject& request) {
  const std::lock_guard<std::mutex> lock(request.mutex);
  if (request.closed) {
    throw Error(Status::kHandle, "the request was closed");
  }
  if (request.state != State::kBuilding) {
    throw Error(Status::kInvalid, "the request was submitted already");
  }
  const EngineInfo& info = object.engine->info();
  auto submission = std::make_shared<Submission>();
  submission->request = request.request;
  Sampling& sampling = submission->request.sampling;
  // Storage is reserved for max_tokens; no sequence is longer than the context.
  sampling.max_tokens = std::min(sampling.max_tokens, info.max_context_tokens);
  sampling.min_tokens = std::min(sampling.min_tokens, info.max_context_tokens);
  const Request& wanted = submission->request;
  const bool captures_session = wanted.capture_from >= 0 && wanted.session != nullptr;
  const int64_t history = captures_session ? object.engine->session_info(wanted.session).num_tokens : 0;
  submission->stream = std::make_unique<TokenStream>(wanted, info.config.vocab_size, request.queue, request.handle,
                                                     request.tag, history);
  request.submission = submission;
  request.state = State::kSubmitting;
  return submission;
}

void end_submit(EngineObject& object, RequestObject& request, bool accepted) {
  bool close = false;
  {
    const std::lock_guard<std::mutex> lock(request.mutex);
    request.state = accepted ? State::kSubmitted : State::kBuilding;
    if (!accepted) {
      request.submission.reset();
    }
    close = accepted && (request.closed || object.closing);
  }
  request.settled.notify_all();
  if (close) {
    close_request(object, request);
  }
}

}  // namespace

std::shared_ptr<RequestObject> create_request(EngineObject& object) {
  auto request = std::make_shared<RequestObject>();
  request->handle = object.requests.add(request);
  return request;
}

RequestBuilder::RequestBuilder(const EngineObject& object, moelora_request handle)
    : object_(object.requests.find(handle)), lock_(object_->mutex) {
  if (object_->state != State::kBuilding) {
    throw Error(Status::kInvalid, "the request was submitted; it cannot be changed any more");
  }
}

std::shared_ptr<Submission> submission_of(const EngineObject& object, moelora_request handle) {
  const std::shared_ptr<RequestObject> request = object.requests.find(handle);
  std::unique_lock<std::mutex> lock(request->mutex);
  request->settled.wait(lock, [&] { return request->state != State::kSubmitting; });
  if (request->state != State::kSubmitted) {
    throw Error(Status::kInvalid, "the request was not submitted");
  }
  return request->submission;
}

std::vector<Error> submit_requests(EngineObject& object, const std::vector<std::shared_ptr<RequestObject>>& requests) {
  std::vector<Error> errors(requests.size(), Error(Status::kOk, ""));
  std::vector<std::shared_ptr<Submission>> submissions;
  std::vector<size_t> index;  // in `requests`, of each submission
  submissions.reserve(requests.size());
  index.reserve(requests.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    if (requests[i] == nullptr) {
      continue;
    }
    try {
      submissions.push_back(begin_submit(object, *requests[i]));
      index.push_back(i);
    } catch (const Error& error) {
      errors[i] = error;
    } catch (const std::bad_alloc&) {
      errors[i] = Error(Status::kNomem, "out of host memory for the output of the request");
    } catch (const std::length_error&) {
      errors[i] = Error(Status::kNomem, "out of host memory for the output of the request");
    }
  }
  std::vector<Error> answers;
  try {
    object.engine->submit_batch(submissions, &answers);
  } catch (const Error& error) {
    answers.assign(submissions.size(), error);
  } catch (const std::bad_alloc&) {
    answers.assign(submissions.size(), Error(Status::kNomem, "out of host memory"));
  }
  for (size_t k = 0; k < submissions.size(); ++k) {
    errors[index[k]] = answers[k];
    end_submit(object, *requests[index[k]], answers[k].status() == Status::kOk);
  }
  return errors;
}

void close_request(EngineObject& object, RequestObject& request) {
  std::shared_ptr<Submission> submission;
  {
    std::unique_lock<std::mutex> lock(request.mutex);
    request.closed = true;
    request.settled.wait(lock, [&] { return request.state != State::kSubmitting; });
    submission = request.submission;
  }
  if (submission == nullptr) {
    return;
  }
  submission->stream->close_reader();
  if (!submission->stream->finished()) {
    object.engine->cancel(submission, false);
  }
}

void close_all_requests(EngineObject& object) {
  for (const std::shared_ptr<RequestObject>& request : object.requests.all()) {
    close_request(object, *request);
  }
}

moelora_result to_result(const RequestResult& result) {
  static_assert(static_cast<int>(FinishReason::kError) == MOELORA_FINISH_ERROR &&
                static_cast<int>(FinishReason::kCancelled) == MOELORA_FINISH_CANCELLED);
  moelora_result out = {};
  out.finish_reason = static_cast<int32_t>(result.finish);
  out.status = static_cast<int32_t>(result.status);
  out.prompt_tokens = result.prompt_tokens;
  out.output_tokens = result.output_tokens;
  out.cached_tokens = result.cached_tokens;
  out.stop_index = result.stop_index;
  out.preemptions = result.preemptions;
  out.seed = result.seed;
  out.queue_ms = result.queue_ms;
  out.adapter_wait_ms = result.adapter_wait_ms;
  out.prefill_ms = result.prefill_ms;
  out.decode_ms = result.decode_ms;
  out.first_token_ms = result.first_token_ms;
  return out;
}

Sampling to_sampling(const moelora_sampling* sampling) {
  moelora_sampling initial;
  moelora_sampling_init(&initial);
  const moelora_sampling given = sampling == nullptr ? initial : read_struct(sampling, "sampling", initial);
  known_flags(given.flags, MOELORA_SAMPLING_IGNORE_EOS);
  if (given.n != 1) {
    throw Error(Status::kUnsupported, fmt::format("sampling.n = {}; only 1 is supported", given.n));
  }
  if (given.reserved != 0) {
    throw Error(Status::kInvalid, "sampling.reserved is not 0");
  }
  Sampling out;
  out.temperature = given.temperature;
  out.top_k = given.top_k;
  out.top_p = given.top_p;
  out.min_p = given.min_p;
  out.repetition_penalty = given.repetition_penalty;
  out.presence_penalty = given.presence_penalty;
  out.frequency_penalty = given.frequency_penalty;
  out.seed = given.seed;
  out.max_tokens = given.max_tokens;
  out.min_tokens = given.min_tokens;
  out.logprobs = given.logprobs;
  out.ignore_eos = (given.flags & MOELORA_SAMPLING_IGNORE_EOS) != 0;
  return out;
}

Status read_output(EngineObject& object, const Submission& submission, int32_t timeout_ms, int32_t* tokens,
                   size_t capacity, size_t* n, TextTarget* text) {
  TokenStream& stream = *submission.stream;
  const auto limit = static_cast<size_t>(object.engine->options().output_buffer_tokens);
  const bool was_full = stream.unread() >= limit;
  const Status status = stream.read(timeout_ms, tokens, capacity, n, text);
  if (was_full && (*n > 0 || text != nullptr)) {
    object.engine->notify();  // it may go on
  }
  switch (status) {
    case Status::kBusy:
      throw Error(status, "another thread is reading this request");
    case Status::kClosed:
      throw Error(status, "the request was closed");
    case Status::kEnd: {
      const RequestResult result = stream.result();
      if (result.finish == FinishReason::kError) {
        throw RequestError(result.status, result.message);
      }
      return status;
    }
    default:
      return status;
  }
}

}  // namespace moelora::api
