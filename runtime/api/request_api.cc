// SPDX-License-Identifier: Apache-2.0
// moelora.h, group "requests", first half: building and submitting. Reading is in output_api.cc. A request becomes the
// engine's at moelora_request_submit; from there follow Engine::submit_batch.
#include "runtime/api/boundary.h"
#include "runtime/api/handles.h"
#include "runtime/api/request_flow.h"
#include "runtime/io/json.h"

using namespace moelora;
using namespace moelora::api;

namespace {

constexpr size_t kStopTokensMax = 64;
constexpr size_t kStopStringsMax = 64;
constexpr size_t kStopBytesMax = 1024;
constexpr size_t kCacheSaltBytesMax = 256;

// Every setter: `change(request, engine object)` on a request that is still being built.
template <class Change>
moelora_status build(moelora_engine* engine, moelora_request request, moelora_error* err, const Change& change) {
  return guard(err, [&] {
    const EngineCall call(engine);
    const RequestBuilder builder(*call, request);
    change(*builder.operator->(), *call);
    return Status::kOk;
  });
}

}  // namespace

moelora_status moelora_request_create(moelora_engine* engine, moelora_request* out, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    required(out, "out");
    *out = create_request(*call)->handle;
    return Status::kOk;
  });
}

moelora_status moelora_request_set_text(moelora_engine* engine, moelora_request request, const char* text,
                                        size_t text_len, moelora_error* err) {
  return build(engine, request, err, [&](RequestObject& object, EngineObject& owner) {
    const std::shared_ptr<const Tokenizer> tokenizer = tokenizer_of(owner);
    set_prompt(owner, object.request, *tokenizer, text_argument("text", text, text_len, kTextBytesMax));
  });
}

moelora_status moelora_request_set_tokens(moelora_engine* engine, moelora_request request, const int32_t* tokens,
                                          size_t num_tokens, moelora_error* err) {
  return build(engine, request, err, [&](RequestObject& object, EngineObject& owner) {
    set_prompt(owner, object.request, tokens, num_tokens);
  });
}

moelora_status moelora_request_set_adapter(moelora_engine* engine, moelora_request request, moelora_adapter adapter,
                                           float scale, moelora_error* err) {
  return build(engine, request, err, [&](RequestObject& object, EngineObject& owner) {
    if (object.request.session != nullptr) {
      throw Error(Status::kInvalid, "the request has a session, whose adapter is fixed");
    }
    object.request.scale = finite_scale(scale);
    object.request.adapter = owner.adapter_or_base(adapter);
  });
}

moelora_status moelora_request_set_session(moelora_engine* engine, moelora_request request, moelora_session session,
                                           moelora_error* err) {
  return build(engine, request, err, [&](RequestObject& object, EngineObject& owner) {
    if (object.request.session == nullptr && object.request.adapter != nullptr) {
      throw Error(Status::kInvalid, "the request has an adapter; a session brings its own");
    }
    object.request.session = session == 0 ? nullptr : owner.sessions.find(session)->session;
    const Session* found = object.request.session.get();
    object.request.adapter = found == nullptr ? nullptr : found->adapter;
    object.request.scale = found == nullptr ? 1.0f : found->scale;
  });
}

moelora_status moelora_request_set_sampling(moelora_engine* engine, moelora_request request,
                                            const moelora_sampling* sampling, moelora_error* err) {
  return build(engine, request, err, [&](RequestObject& object, EngineObject&) {
    object.request.sampling = to_sampling(&required(sampling, "sampling"));
  });
}

moelora_status moelora_request_add_stop(moelora_engine* engine, moelora_request request, const char* text,
                                        size_t text_len, moelora_error* err) {
  return build(engine, request, err, [&](RequestObject& object, EngineObject& owner) {
    std::shared_ptr<const Tokenizer> tokenizer = tokenizer_of(owner);
    std::string stop = text_argument("stop string", text, text_len, kStopBytesMax);
    if (stop.empty()) {
      throw Error(Status::kInvalid, "the stop string is empty");
    }
    if (!is_valid_utf8(stop)) {
      throw Error(Status::kInvalid, "the stop string is not valid UTF-8");
    }
    std::vector<StopString>& stops = object.request.stop_strings;
    if (stops.size() == kStopStringsMax) {
      throw Error(Status::kInvalid, fmt::format("more than {} stop strings", kStopStringsMax));
    }
    stops.push_back({std::move(stop), static_cast<int32_t>(stops.size() + object.request.stop_tokens.size())});
    object.request.tokenizer = std::move(tokenizer);
  });
}

moelora_status moelora_request_add_stop_token(moelora_engine* engine, moelora_request request, int32_t token,
                                              moelora_error* err) {
  return build(engine, request, err, [&](RequestObject& object, EngineObject& owner) {
    const int32_t vocab_size = owner.engine->info().config.vocab_size;
    if (token < 0 || token >= vocab_size) {
      throw Error(Status::kInvalid, fmt::format("stop token {} is outside the vocabulary of {}", token, vocab_size));
    }
    if (object.request.stop_tokens.size() == kStopTokensMax) {
      throw Error(Status::kInvalid, fmt::format("more than {} stop tokens", kStopTokensMax));
    }
    object.request.stop_tokens.push_back(token);
  });
}

moelora_status moelora_request_set_queue(moelora_engine* engine, moelora_request request, moelora_queue* queue,
                                         uint64_t tag, moelora_error* err) {
  return build(engine, request, err, [&](RequestObject& object, EngineObject&) {
    object.queue = queue == nullptr ? nullptr : find_queue(queue);
    object.tag = tag;
  });
}

moelora_status moelora_request_set_priority(moelora_engine* engine, moelora_request request, int32_t priority,
                                            moelora_error* err) {
  return build(engine, request, err, [&](RequestObject& object, EngineObject&) { object.request.priority = priority; });
}

moelora_status moelora_request_set_deadline(moelora_engine* engine, moelora_request request, uint64_t milliseconds,
                                            moelora_error* err) {
  return build(engine, request, err,
               [&](RequestObject& object, EngineObject&) { object.request.deadline_ms = milliseconds; });
}

moelora_status moelora_request_set_cache_salt(moelora_engine* engine, moelora_request request, const char* salt,
                                              size_t salt_len, moelora_error* err) {
  return build(engine, request, err, [&](RequestObject& object, EngineObject&) {
    object.request.cache_salt = text_argument("salt", salt, salt_len, kCacheSaltBytesMax);
  });
}

moelora_status moelora_request_capture_logits(moelora_engine* engine, moelora_request request, int32_t first_position,
                                              moelora_error* err) {
  return build(engine, request, err, [&](RequestObject& object, EngineObject&) {
    if (first_position < -1) {
      throw Error(Status::kInvalid, fmt::format("first_position is {}", first_position));
    }
    object.request.capture_from = first_position;
  });
}

moelora_status moelora_request_submit(moelora_engine* engine, moelora_request request, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    const Error answer = submit_requests(*call, {call->requests.find(request)}).front();
    if (answer.status() != Status::kOk) {
      throw answer;
    }
    return Status::kOk;
  });
}

moelora_status moelora_submit_batch(moelora_engine* engine, const moelora_request* requests, size_t num_requests,
                                    moelora_status* each, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    if (num_requests > 0) {
      required(requests, "requests");
    }
    std::vector<std::shared_ptr<RequestObject>> objects(num_requests);
    std::vector<Error> unknown(num_requests, Error(Status::kOk, ""));
    for (size_t i = 0; i < num_requests; ++i) {
      try {
        objects[i] = call->requests.find(requests[i]);
      } catch (const Error& error) {
        unknown[i] = error;
      }
    }
    const std::vector<Error> answers = submit_requests(*call, objects);
    size_t first_error = num_requests;
    for (size_t i = 0; i < num_requests; ++i) {
      const Status status = objects[i] == nullptr ? unknown[i].status() : answers[i].status();
      if (each != nullptr) {
        each[i] = static_cast<moelora_status>(status);
      }
      if (status != Status::kOk) {
        first_error = std::min(first_error, i);
      }
    }
    if (first_error == num_requests) {
      return Status::kOk;
    }
    const Error& error = objects[first_error] == nullptr ? unknown[first_error] : answers[first_error];
    throw Error(error.status(), fmt::format("request {} of {}: {}", first_error, num_requests, error.what()));
  });
}
