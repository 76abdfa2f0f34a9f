// SPDX-License-Identifier: Apache-2.0
// moelora.h, group "requests", second half: reading, results, cancelling, closing, and the blocking generate calls.
#include "runtime/api/boundary.h"
#include "runtime/api/handles.h"
#include "runtime/api/request_flow.h"

using namespace moelora;
using namespace moelora::api;

moelora_status moelora_request_read(moelora_engine* engine, moelora_request request, int32_t timeout_ms,
                                    int32_t* tokens, size_t token_cap, char* text, size_t text_cap,
                                    moelora_chunk* chunk, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    if (chunk != nullptr) {
      check_struct(chunk, "chunk");
    }
    if (chunk == nullptr && token_cap != 1) {
      throw Error(Status::kInvalid, "chunk is NULL, but token_cap is not 1");
    }
    if (text != nullptr || text_cap > 0) {
      fail_no_tokenizer();
    }
    if (token_cap == 0) {
      throw Error(Status::kInvalid, "token_cap is 0");
    }
    required(tokens, "tokens");
    const std::shared_ptr<Submission> submission = submission_of(*call, request);
    size_t count = 0;
    const size_t cap = std::min<size_t>(token_cap, INT32_MAX);
    const Status status = read_tokens(*call, *submission, timeout_ms, tokens, cap, &count);
    if (chunk != nullptr) {
      moelora_chunk out = {};
      out.first_position = static_cast<int32_t>(submission->stream->num_read() - count);
      out.num_tokens = static_cast<uint32_t>(count);
      write_struct(chunk, out);
    }
    return status;
  });
}

moelora_status moelora_request_read_logprobs(moelora_engine* engine, moelora_request request, int32_t first,
                                             int32_t count, moelora_logprob* buf, size_t cap, size_t* n,
                                             moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    if (first < 0 || count < 0) {
      throw Error(Status::kInvalid, fmt::format("first = {}, count = {}", first, count));
    }
    required(n, "n");
    const std::shared_ptr<Submission> submission = submission_of(*call, request);
    std::vector<TopLogprob> entries;
    size_t needed = 0;
    do {  // again where more arrived meanwhile
      entries.resize(std::min(cap, needed));
      submission->stream->read_logprobs(first, count, entries.data(), entries.size(), &needed);
    } while (needed <= cap && needed > entries.size());
    *n = needed;
    if (needed > cap) {
      return Status::kMore;
    }
    if (needed > 0) {
      required(buf, "buf");
    }
    for (size_t i = 0; i < needed; ++i) {
      buf[i] = {entries[i].position, entries[i].token, entries[i].logprob, entries[i].rank};
    }
    return Status::kOk;
  });
}

moelora_status moelora_request_result(moelora_engine* engine, moelora_request request, moelora_result* result,
                                      moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    check_struct(result, "result");
    const std::shared_ptr<Submission> submission = submission_of(*call, request);
    if (!submission->stream->finished()) {
      throw Error(Status::kBusy, "the request is still running");
    }
    write_struct(result, to_result(submission->stream->result()));
    return Status::kOk;
  });
}

moelora_status moelora_request_cancel(moelora_engine* engine, moelora_request request, uint32_t flags,
                                      moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    known_flags(flags, MOELORA_CANCEL_DROP_TURN);
    const std::shared_ptr<RequestObject> object = call->requests.find(request);
    std::shared_ptr<Submission> submission;
    {
      std::unique_lock<std::mutex> lock(object->mutex);
      object->settled.wait(lock, [&] { return object->state != RequestObject::State::kSubmitting; });
      submission = object->submission;
    }
    if (submission == nullptr || submission->stream->finished()) {
      return Status::kAlreadyDone;
    }
    call->engine->cancel(submission, (flags & MOELORA_CANCEL_DROP_TURN) != 0);
    return Status::kOk;
  });
}

moelora_status moelora_request_close(moelora_engine* engine, moelora_request request, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    if (request == 0) {
      return Status::kOk;
    }
    close_request(*call, *call->requests.remove(request));
    return Status::kOk;
  });
}

moelora_status moelora_request_captured(moelora_engine* engine, moelora_request request, int32_t* num_rows,
                                        int32_t* first_position, int32_t* vocab_size, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    const std::shared_ptr<Submission> submission = submission_of(*call, request);
    if (num_rows != nullptr) {
      *num_rows = submission->stream->captured_rows();
    }
    if (first_position != nullptr) {
      *first_position = submission->stream->captured_first();
    }
    if (vocab_size != nullptr) {
      *vocab_size = call->engine->info().config.vocab_size;
    }
    return Status::kOk;
  });
}

moelora_status moelora_request_read_captured(moelora_engine* engine, moelora_request request, int32_t row,
                                             float* logits, size_t cap, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    if (cap > 0) {
      required(logits, "logits");
    }
    const std::shared_ptr<Submission> submission = submission_of(*call, request);
    const size_t width = submission->stream->read_captured(row, logits, cap);
    if (width == 0) {
      throw Error(Status::kInvalid,
                  fmt::format("row {} of {} captured ones", row, submission->stream->captured_rows()));
    }
    return width > cap ? Status::kMore : Status::kOk;
  });
}

moelora_status moelora_request_router_gap(moelora_engine* engine, moelora_request request, int32_t row, float* gap,
                                          moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    required(gap, "gap");
    const std::shared_ptr<Submission> submission = submission_of(*call, request);
    if (!submission->stream->router_gap(row, gap)) {
      throw Error(Status::kInvalid,
                  fmt::format("row {} of {} captured ones", row, submission->stream->captured_rows()));
    }
    return Status::kOk;
  });
}

namespace {

// A request that ends with the call, known by a handle meanwhile so that the release of the engine finds it.
class OwnedRequest {
 public:
  explicit OwnedRequest(EngineObject& owner) : owner_(owner), object_(create_request(owner)) {}
  ~OwnedRequest() {
    try {
      close_request(owner_, *owner_.requests.remove(object_->handle));
    } catch (const Error&) {  // the host closed a handle it was never given; nothing is left to do
    }
  }
  OwnedRequest(const OwnedRequest&) = delete;
  OwnedRequest& operator=(const OwnedRequest&) = delete;
  RequestObject* operator->() const { return object_.get(); }
  [[nodiscard]] const std::shared_ptr<RequestObject>& object() const { return object_; }

 private:
  EngineObject& owner_;
  std::shared_ptr<RequestObject> object_;
};

}  // namespace

moelora_status moelora_generate_tokens(moelora_engine* engine, moelora_adapter adapter, float scale,
                                       const int32_t* prompt, size_t num_prompt, const moelora_sampling* sampling,
                                       int32_t* tokens, size_t token_cap, size_t* n, moelora_result* result,
                                       moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    if (result != nullptr) {
      check_struct(result, "result");
    }
    required(tokens, "tokens");
    required(n, "n");
    const OwnedRequest request(*call);
    request->request.sampling = to_sampling(sampling);
    const int32_t max_tokens = request->request.sampling.max_tokens;
    if (max_tokens > 0 && token_cap < static_cast<size_t>(max_tokens)) {
      throw Error(Status::kInvalid, fmt::format("token_cap is {}, less than max_tokens = {}", token_cap, max_tokens));
    }
    const auto context = static_cast<size_t>(call->engine->info().max_context_tokens);
    if (num_prompt > context) {
      throw Error(Status::kContextLength,
                  fmt::format("a prompt of {} tokens exceeds the context of {}", num_prompt, context));
    }
    if (num_prompt > 0) {
      required(prompt, "prompt");
    }
    request->request.prompt.assign(prompt, prompt + num_prompt);
    request->request.adapter = call->adapter_or_base(adapter);
    request->request.scale = finite_scale(scale);
    const Error answer = submit_requests(*call, {request.object()}).front();
    if (answer.status() != Status::kOk) {
      throw answer;
    }
    const std::shared_ptr<Submission> submission = submission_of(*call, request->handle);
    size_t total = 0;
    int32_t beyond = 0;  // a place to read to when the buffer is full; the end comes then
    for (Status status = Status::kOk; status != Status::kEnd;) {
      size_t count = 0;
      const bool full = total == token_cap;
      status =
          read_tokens(*call, *submission, -1, full ? &beyond : tokens + total, full ? 1 : token_cap - total, &count);
      MOELORA_ASSERT(!full || count == 0);
      total += count;
    }
    *n = total;
    const RequestResult ended = submission->stream->result();
    if (result != nullptr) {
      write_struct(result, to_result(ended));
    }
    return Status::kOk;
  });
}

moelora_status moelora_generate(moelora_engine* engine, moelora_adapter adapter, float scale, const char* prompt,
                                size_t prompt_len, const moelora_sampling* sampling, char* text, size_t text_cap,
                                size_t* n, moelora_result* result, moelora_error* err) {
  (void)adapter, (void)scale, (void)prompt, (void)prompt_len, (void)sampling, (void)text, (void)text_cap, (void)n;
  (void)result;
  return guard(err, [&]() -> Status {
    const EngineCall call(engine);
    fail_no_tokenizer();
  });
}
