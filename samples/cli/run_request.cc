// SPDX-License-Identifier: Apache-2.0
// See run_request.h.
#include "samples/cli/run_request.h"

#include <functional>

namespace moelora_cli {
namespace {

[[noreturn]] void wrong(const std::string& field, const char* expected) {
  throw Failure(MOELORA_E_INVALID, "field \"" + field + "\": expected " + expected);
}

template <class Number>
void number(const Json& value, const std::string& field, Number& out) {
  if (!value.is_number() || (std::is_integral_v<Number> && !value.is_number_integer())) {
    wrong(field, std::is_integral_v<Number> ? "an integer" : "a number");
  }
  if constexpr (std::is_same_v<Number, int32_t>) {
    const auto wide = value.get<int64_t>();
    if (wide < INT32_MIN || wide > INT32_MAX) {
      wrong(field, "a 32-bit integer");
    }
  }
  if (std::is_unsigned_v<Number> && value.is_number_integer() && !value.is_number_unsigned()) {
    wrong(field, "a number that is not negative");
  }
  out = value.get<Number>();
}

std::vector<int32_t> token_list(const Json& value, const std::string& field) {
  if (!value.is_array()) {
    wrong(field, "a list of token ids");
  }
  std::vector<int32_t> tokens;
  for (const Json& item : value) {
    number(item, field, tokens.emplace_back());
  }
  return tokens;
}

std::vector<std::string> text_list(const Json& value, const std::string& field) {
  std::vector<std::string> texts;
  for (const Json& item : value.is_array() ? value : Json::array({value})) {
    if (!item.is_string()) {
      wrong(field, "a string or a list of strings");
    }
    texts.push_back(item.get<std::string>());
  }
  return texts;
}

std::string one_text(const Json& value, const std::string& field) {
  if (!value.is_string()) {
    wrong(field, "a string");
  }
  return value.get<std::string>();
}

// Everything but the numbers of sampling.
class Builder {
 public:
  Builder(const RunContext& context, uint64_t tag)
      : context_(context), engine_(context.engine->get()), request_(engine_), sampling_(context.defaults) {
    request_.set_queue(*context.queue, tag);
    if (context.has_text) {
      request_.want_text();
    }
    add_sampling_fields();
    add_other_fields();
  }

  Request build(const Json& line) {
    if (!line.is_object()) {
      throw Failure(MOELORA_E_INVALID, "a request is a JSON object");
    }
    for (const auto& [field, value] : line.items()) {
      const auto known = fields_.find(field);
      if (known == fields_.end()) {
        throw Failure(MOELORA_E_INVALID, "unknown field \"" + field + "\"");
      }
      if (!value.is_null()) {
        known->second(value, field);
      }
    }
    if (!has_prompt_) {
      throw Failure(MOELORA_E_INVALID, "a request has \"tokens\" or \"prompt\"");
    }
    request_.set_sampling(sampling_);
    if (adapter_ != 0) {
      request_.set_adapter(adapter_, scale_);
    }
    return std::move(request_);
  }

 private:
  using Setter = std::function<void(const Json&, const std::string&)>;

  template <class Number>
  void add_number(const char* name, Number& out) {
    fields_[name] = [&out](const Json& value, const std::string& field) { number(value, field, out); };
  }

  void add_sampling_fields() {
    add_number("max_tokens", sampling_.max_tokens);
    add_number("min_tokens", sampling_.min_tokens);
    add_number("temperature", sampling_.temperature);
    add_number("top_k", sampling_.top_k);
    add_number("top_p", sampling_.top_p);
    add_number("min_p", sampling_.min_p);
    add_number("repetition_penalty", sampling_.repetition_penalty);
    add_number("presence_penalty", sampling_.presence_penalty);
    add_number("frequency_penalty", sampling_.frequency_penalty);
    add_number("seed", sampling_.seed);
    add_number("n", sampling_.n);
    fields_["ignore_eos"] = [this](const Json& value, const std::string& field) {
      if (!value.is_boolean()) {
        wrong(field, "true or false");
      }
      sampling_.flags = value.get<bool>() ? MOELORA_SAMPLING_IGNORE_EOS : 0;
    };
  }

  void add_other_fields() {
    fields_["id"] = [](const Json&, const std::string&) {};
    add_number("scale", scale_);
    fields_["adapter"] = [this](const Json& value, const std::string& field) { set_adapter(value, field); };
    fields_["tokens"] = [this](const Json& value, const std::string& field) {
      take_prompt();
      request_.set_tokens(token_list(value, field));
    };
    fields_["prompt"] = [this](const Json& value, const std::string& field) {
      take_prompt();
      request_.set_text(one_text(value, field));
    };
    fields_["text"] = fields_["prompt"];
    fields_["stop"] = [this](const Json& value, const std::string& field) {
      for (const std::string& text : text_list(value, field)) {
        request_.add_stop(text);
      }
    };
    fields_["stop_tokens"] = [this](const Json& value, const std::string& field) {
      for (const int32_t token : token_list(value, field)) {
        must(moelora_request_add_stop_token, engine_, request_.handle(), token);
      }
    };
    fields_["priority"] = [this](const Json& value, const std::string& field) {
      int32_t priority = 0;
      number(value, field, priority);
      must(moelora_request_set_priority, engine_, request_.handle(), priority);
    };
    fields_["deadline_ms"] = [this](const Json& value, const std::string& field) {
      uint64_t deadline = 0;
      number(value, field, deadline);
      must(moelora_request_set_deadline, engine_, request_.handle(), deadline);
    };
    fields_["cache_salt"] = [this](const Json& value, const std::string& field) {
      const std::string salt = one_text(value, field);
      must(moelora_request_set_cache_salt, engine_, request_.handle(), salt.data(), salt.size());
    };
  }

  void take_prompt() {
    if (std::exchange(has_prompt_, true)) {
      throw Failure(MOELORA_E_INVALID, "a request has one of \"tokens\" and \"prompt\" (or \"text\"), not both");
    }
  }

  void set_adapter(const Json& value, const std::string& field) {
    if (!value.is_string()) {
      wrong(field, "the name of an adapter, or null for the base");
    }
    const auto found = context_.adapters.find(value.get<std::string>());
    if (found == context_.adapters.end()) {
      throw Failure(MOELORA_E_NOT_FOUND, "no adapter \"" + value.get<std::string>() + "\" was given by --adapter");
    }
    adapter_ = found->second;
  }

  const RunContext& context_;
  moelora_engine* engine_;
  Request request_;
  moelora_sampling sampling_;
  moelora_adapter adapter_ = 0;
  float scale_ = 1.0f;
  bool has_prompt_ = false;
  std::map<std::string, Setter> fields_;
};

}  // namespace

Json run_id(const Json& line, size_t number) {
  return line.is_object() && line.contains("id") ? line["id"] : Json(number);
}

Request make_run_request(const RunContext& context, const Json& line, uint64_t tag) {
  return Builder(context, tag).build(line);
}

Json run_answer(const Json& id, const Request& request) {
  const moelora_result result = request.result();
  Json answer = {{"id", id}, {"tokens", request.tokens()}};
  if (request.wants_text()) {
    answer["text"] = request.text();
  }
  answer["finish_reason"] = finish_name(result.finish_reason);
  answer["usage"] = {{"prompt_tokens", result.prompt_tokens},
                     {"output_tokens", result.output_tokens},
                     {"cached_tokens", result.cached_tokens}};
  answer["timing"] = {{"first_token_ms", result.first_token_ms},
                      {"queue_ms", result.queue_ms},
                      {"prefill_ms", result.prefill_ms},
                      {"decode_ms", result.decode_ms}};
  return answer;
}

Json run_error(const Json& id, moelora_status status, const std::string& message) {
  return {{"id", id}, {"error", {{"status", moelora_status_name(status)}, {"message", message}}}};
}

}  // namespace moelora_cli
