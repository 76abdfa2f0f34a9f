// SPDX-License-Identifier: Apache-2.0
// The part of request_flow.h that knows text: prompts, and whose tokenizer.
#include <algorithm>

#include "runtime/api/boundary.h"
#include "runtime/api/request_flow.h"

namespace moelora::api {

void set_prompt(const EngineObject& object, Request& request, const int32_t* tokens, size_t num_tokens) {
  const auto context = static_cast<size_t>(object.engine->info().max_context_tokens);
  if (num_tokens > context) {
    throw Error(Status::kContextLength,
                fmt::format("a prompt of {} tokens exceeds the context of {}", num_tokens, context));
  }
  if (num_tokens > 0) {
    required(tokens, "prompt");
  }
  request.prompt.assign(tokens, tokens + num_tokens);
  request.opening.clear();
}

void set_prompt(const EngineObject& object, Request& request, const Tokenizer& tokenizer, const std::string& text) {
  const std::vector<int32_t> ids = tokenizer.encode(text, {.add_special = false, .parse_special = true});
  set_prompt(object, request, ids.data(), ids.size());
  // A chat template's text often begins with the BOS itself.
  const std::vector<int32_t>& opening = tokenizer.opening();
  const bool has_it = ids.size() >= opening.size() && std::equal(opening.begin(), opening.end(), ids.begin());
  if (!has_it) {
    request.opening = opening;
  }
}

OutputText& text_of(Submission& submission, const std::shared_ptr<const Tokenizer>& tokenizer) {
  std::call_once(submission.text_asked, [&] {
    submission.text = std::make_unique<OutputText>(tokenizer, submission.request.stop_strings,
                                                   submission.request.sampling.min_tokens);
  });
  return *submission.text;
}

std::shared_ptr<const Tokenizer> tokenizer_of(EngineObject& object) {
  try {
    return object.model_tokenizer();
  } catch (const Error& error) {
    if (error.status() != Status::kNotFound) {
      throw;
    }
    throw Error(Status::kUnsupported, std::string("no tokenizer: ") + error.what());
  }
}

}  // namespace moelora::api
