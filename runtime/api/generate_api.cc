// SPDX-License-Identifier: Apache-2.0
// moelora.h, group "requests", the blocking calls: a request built, submitted, read to its end and closed in one.
#include <cstring>

#include "runtime/api/boundary.h"
#include "runtime/api/handles.h"
#include "runtime/api/request_flow.h"
#include "runtime/io/utf8.h"

using namespace moelora;
using namespace moelora::api;

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
  // Hands it to the engine, with sampling and prompt set before.
  std::shared_ptr<Submission> submit(moelora_adapter adapter, float scale) {
    object_->request.adapter = owner_.adapter_or_base(adapter);
    object_->request.scale = finite_scale(scale);
    const Error answer = submit_requests(owner_, {object_}).front();
    if (answer.status() != Status::kOk) {
      throw answer;
    }
    return submission_of(owner_, object_->handle);
  }
  RequestObject* operator->() const { return object_.get(); }

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
    OwnedRequest request(*call);
    request->request.sampling = to_sampling(sampling);
    const int32_t max_tokens = request->request.sampling.max_tokens;
    if (max_tokens > 0 && token_cap < static_cast<size_t>(max_tokens)) {
      throw Error(Status::kInvalid, fmt::format("token_cap is {}, less than max_tokens = {}", token_cap, max_tokens));
    }
    set_prompt(*call, request->request, prompt, num_prompt);
    const std::shared_ptr<Submission> submission = request.submit(adapter, scale);
    size_t total = 0;
    int32_t beyond = 0;  // a place to read to when the buffer is full; the end comes then
    for (Status status = Status::kOk; status != Status::kEnd;) {
      size_t count = 0;
      const bool full = total == token_cap;
      status =
          read_output(*call, *submission, -1, full ? &beyond : tokens + total, full ? 1 : token_cap - total, &count);
      MOELORA_ASSERT(!full || count == 0);
      total += count;
    }
    *n = total;
    if (result != nullptr) {
      write_struct(result, to_result(submission->stream->result()));
    }
    return Status::kOk;
  });
}

moelora_status moelora_generate(moelora_engine* engine, moelora_adapter adapter, float scale, const char* prompt,
                                size_t prompt_len, const moelora_sampling* sampling, char* text, size_t text_cap,
                                size_t* n, moelora_result* result, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    if (result != nullptr) {
      check_struct(result, "result");
    }
    if (text_cap > 0) {
      required(text, "text");
    }
    required(n, "n");
    const std::shared_ptr<const Tokenizer> tokenizer = tokenizer_of(*call);
    OwnedRequest request(*call);
    request->request.sampling = to_sampling(sampling);
    set_prompt(*call, request->request, *tokenizer, text_argument("prompt", prompt, prompt_len, kTextBytesMax));
    const std::shared_ptr<Submission> submission = request.submit(adapter, scale);
    size_t total = 0;
    size_t copied = 0;
    bool fits = true;
    for (Status status = Status::kOk; status != Status::kEnd;) {
      char buffer[1024];
      TextTarget target{text_of(*submission, tokenizer), buffer, sizeof buffer};
      size_t count = 0;
      status = read_output(*call, *submission, -1, nullptr, 0, &count, &target);
      // What does not fit is counted; the generation is not worth repeating for it.
      const size_t room = fits ? whole_code_points({buffer, target.n}, text_cap - copied) : 0;
      if (room > 0) {
        std::memcpy(text + copied, buffer, room);
      }
      copied += room;
      total += target.n;
      fits = copied == total;
    }
    *n = total;
    if (result != nullptr) {
      write_struct(result, to_result(submission->stream->result()));
    }
    return fits ? Status::kOk : Status::kMore;
  });
}
