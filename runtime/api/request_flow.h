// SPDX-License-Identifier: Apache-2.0
// A request's way from builder to result, below the C functions: the states of RequestObject and the rules for who
// may do what in each. Used by request_api.cc, generate_api.cc and the release of an engine.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "runtime/api/handles.h"

namespace moelora::api {

std::shared_ptr<RequestObject> create_request(EngineObject& object);

// Access to a request that is still being built; throws Error{kInvalid} once it was submitted.
class RequestBuilder {
 public:
  RequestBuilder(const EngineObject& object, moelora_request handle);
  RequestObject* operator->() const { return object_.get(); }

 private:
  std::shared_ptr<RequestObject> object_;
  std::unique_lock<std::mutex> lock_;
};

// What the engine has of it; throws Error{kInvalid} if it was not submitted.
std::shared_ptr<Submission> submission_of(const EngineObject& object, moelora_request handle);

// Hands them to the engine in order under one of its locks; one Error (kOk or not) for each. A null entry is
// skipped. Refused requests are builders again.
std::vector<Error> submit_requests(EngineObject& object, const std::vector<std::shared_ptr<RequestObject>>& requests);

// Cancels if it runs, wakes its reader. The handle was removed before, or the engine is going.
void close_request(EngineObject& object, RequestObject& request);
// For the last release: after it no call waits for a request, and none is submitted any more.
void close_all_requests(EngineObject& object);

moelora_result to_result(const RequestResult& result);
Sampling to_sampling(const moelora_sampling* sampling);

// The prompt as token ids or as text; throws Error{kContextLength}, or {kInvalid} for text that is not UTF-8.
void set_prompt(const EngineObject& object, Request& request, const int32_t* tokens, size_t num_tokens);
void set_prompt(const EngineObject& object, Request& request, const Tokenizer& tokenizer, const std::string& text);

// The next tokens and, with `text`, text; kOk, kTimeout or kEnd. Throws RequestError if the request failed and all
// before was read.
Status read_output(EngineObject& object, const Submission& submission, int32_t timeout_ms, int32_t* tokens,
                   size_t capacity, size_t* n, TextTarget* text = nullptr);
// The output as text, from its beginning.
OutputText& text_of(Submission& submission, const std::shared_ptr<const Tokenizer>& tokenizer);

constexpr size_t kTextBytesMax = size_t{1} << 30;
// The model's; throws Error{kUnsupported} if its folder has none.
std::shared_ptr<const Tokenizer> tokenizer_of(EngineObject& object);

}  // namespace moelora::api
