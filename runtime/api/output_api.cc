// SPDX-License-Identifier: Apache-2.0
// moelora.h, group "requests", second half: reading, results, cancelling, closing.
#include <optional>

#include "runtime/api/boundary.h"
#include "runtime/api/handles.h"
#include "runtime/api/request_flow.h"

using namespace moelora;
using namespace moelora::api;

namespace {

constexpr size_t kTextCapMin = 4;

}  // namespace

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
    if (token_cap == 0 && text_cap == 0) {
      throw Error(Status::kInvalid, "token_cap and text_cap are 0");
    }
    if (token_cap > 0) {
      required(tokens, "tokens");
    }
    std::shared_ptr<const Tokenizer> tokenizer;
    if (text_cap > 0) {
      required(text, "text");
      if (text_cap < kTextCapMin) {
        throw Error(Status::kInvalid,
                    fmt::format("text_cap is {}; a character may have {} bytes", text_cap, kTextCapMin));
      }
      tokenizer = tokenizer_of(*call);
    }
    const std::shared_ptr<Submission> submission = submission_of(*call, request);
    std::optional<TextTarget> target;
    if (text_cap > 0) {
      target.emplace(TextTarget{text_of(*submission, tokenizer), text, std::min<size_t>(text_cap, INT32_MAX)});
    }
    size_t count = 0;
    const size_t cap = std::min<size_t>(token_cap, INT32_MAX);
    const Status status = read_output(*call, *submission, timeout_ms, tokens, cap, &count, target ? &*target : nullptr);
    if (chunk != nullptr) {
      moelora_chunk out = {};
      out.first_position = static_cast<int32_t>(submission->stream->num_read() - count);
      out.num_tokens = static_cast<uint32_t>(count);
      out.num_text_bytes = target ? static_cast<uint32_t>(target->n) : 0;
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
