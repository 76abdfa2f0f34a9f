// SPDX-License-Identifier: Apache-2.0
// Requests of a simulation, from their tokens to their end.
#include <algorithm>

#include "tests/sim/simulation.h"

namespace moelora::sim {
namespace {

constexpr int32_t kStopId = 7;

// Requests of one text begin alike; `own` tokens at the end are this one's.
std::vector<int32_t> prompt_of(int64_t number, int64_t text, int64_t length, int64_t own) {
  std::vector<int32_t> tokens;
  tokens.reserve(static_cast<size_t>(length));
  for (int64_t i = 0; i < length; ++i) {
    const bool shared = i < length - own;
    const Stamp source = shared ? static_cast<Stamp>(text) : mix(static_cast<Stamp>(number), 0x452821e638d01377ull);
    tokens.push_back(static_cast<int32_t>(mix(source, static_cast<Stamp>(i)) % kVocabSize));
  }
  return tokens;
}

const char* name_of(FinishReason reason) {
  constexpr const char* kNames[] = {"none", "stop", "length", "cancelled", "deadline", "error"};
  return kNames[static_cast<size_t>(reason)];
}

}  // namespace

void Simulation::fail(const SimRequest& request, const std::string& what) const {
  throw Failure("request " + std::to_string(request.number) + " (" + std::to_string(request.num_history) +
                " tokens before, prompt " + std::to_string(request.num_prompt - request.num_history) + ", " +
                std::to_string(request.num_delivered) + " delivered, image " + std::to_string(request.key.image) +
                "): " + what);
}

void Simulation::submit(const Event& event, bool is_turn) {
  auto made = std::make_unique<SimRequest>();
  made->number = event.fields[0];
  // The fields behind the third are the same of both, but for one place.
  const auto field = [&](size_t i) { return event.fields[is_turn ? i - 1 : i]; };
  if (is_turn) {
    made->session = find(sessions_, event.fields[1]);
    if (made->session == nullptr || made->session->is_busy) {
      return;
    }
    made->adapter = made->session->adapter;
    made->key = made->session->key;
    made->text = made->session->text;
  } else {
    made->adapter = find(adapters_, event.fields[1]);
    if (event.fields[1] >= 0 && made->adapter == nullptr) {
      return;
    }
  }
  made->submission = std::make_shared<Submission>();
  Request& request = made->submission->request;
  request.session = is_turn ? made->session->session : nullptr;
  request.adapter = made->adapter == nullptr ? nullptr : made->adapter->adapter;
  request.scale = is_turn ? made->session->session->scale : static_cast<float>(event.fields[2]) / 1000.0f;
  if (!is_turn && made->adapter != nullptr) {
    made->key = made->adapter->key;
    made->key.scale = made->adapter->key.scale * request.scale;
  }
  request.prompt = prompt_of(made->number, field(3), field(4), field(5));
  request.sampling.max_tokens = static_cast<int32_t>(field(6));
  request.priority = static_cast<int32_t>(field(7));
  request.deadline_ms = static_cast<uint64_t>(field(8));
  const int64_t flags = field(9);
  made->salt = field(10);
  request.cache_salt = made->salt == 0 ? "" : "salt " + std::to_string(made->salt);
  made->is_slow = (flags & kSlowReader) != 0;
  request.sampling.temperature = (flags & kTemperature) != 0 ? 1.0f : 0.0f;
  request.sampling.presence_penalty = (flags & kPenalty) != 0 ? 0.5f : 0.0f;
  request.sampling.min_tokens = (flags & kMinTokens) != 0 ? std::min(4, request.sampling.max_tokens) : 0;
  request.sampling.seed = made->seed = static_cast<uint64_t>(made->number) * 2 + 1;
  if ((flags & kStopToken) != 0) {
    request.stop_tokens.push_back(kStopId);
  }
  if ((flags & kCapture) != 0) {
    request.capture_from = static_cast<int32_t>(request.prompt.size() / 2);
  }
  made->num_history = made->text.tokens.size();
  made->num_prompt = made->num_history + request.prompt.size();
  made->tokens_max = std::min(static_cast<size_t>(shape_.context), made->num_prompt + static_cast<size_t>(field(6)));
  made->submission->stream = std::make_unique<TokenStream>(
      request, kVocabSize, queue_, static_cast<uint64_t>(made->number), 0, static_cast<int64_t>(made->num_history));
  enter(std::move(made));
}

void Simulation::enter(std::unique_ptr<SimRequest> request) {
  SimRequest& made = *request;
  const bool adapted = made.key.image != 0 && made.key.scale != 0.0f;
  const int64_t pages =
      engine_->parts().geometry.pages(static_cast<int64_t>(made.tokens_max)) + (adapted ? made.key.num_pages : 0);
  const bool is_long = made.num_prompt >= static_cast<size_t>(shape_.context);
  try {
    engine_->submit(made.submission);
  } catch (const Error& error) {
    ++totals_.refused;
    const Status status = error.status();
    const bool is_right = (status == Status::kContextLength && is_long) ||
                          (status == Status::kDeviceNomem && !is_long && pages > shape_.num_pages) ||
                          (status == Status::kOverloaded && active_.size() >= static_cast<size_t>(shape_.queue)) ||
                          (status == Status::kNotFound && made.adapter != nullptr && made.adapter->is_unloaded);
    if (!is_right) {
      fail(made, std::string("refused: ") + error.what());
    }
    return;
  }
  check(!is_long && pages <= shape_.num_pages, "a request that can never fit was taken");
  check(made.adapter == nullptr || !made.adapter->is_unloaded, "an unloaded adapter took a request");
  ++totals_.requests;
  made.num_failed_loads = totals_.loads_failed;
  for (const int32_t token : made.submission->request.prompt) {
    made.text.stamps.push_back(next_stamp(made.text.stamps, token, made.key));
    made.text.tokens.push_back(token);
  }
  if (made.adapter != nullptr) {
    ++made.adapter->in_flight;
  }
  if (made.session != nullptr) {
    made.session->is_busy = true;
  }
  made.place = active_.size();
  active_.push_back(&made);
  requests_[made.number] = std::move(request);
}

void Simulation::cancel(SimRequest& request, bool drop_turn) {
  if (request.cancelled_ms > 0) {
    return;
  }
  request.cancelled_ms = simulated_ms();
  request.drops_turn = drop_turn;
  engine_->cancel(request.submission, drop_turn);
}

void Simulation::collect_events() {
  moelora::Event events[64];
  bool closed = false;
  for (size_t count; (count = queue_->wait(0, events, 64, &closed)) > 0;) {
    for (size_t i = 0; i < count; ++i) {
      const moelora::Event& event = events[i];
      if (event.kind == EventKind::kAdapterReady) {
        --num_prefetches_;
        continue;
      }
      check(event.kind == EventKind::kTokens || event.kind == EventKind::kFinished, "the engine failed");
      const auto found = requests_.find(static_cast<int64_t>(event.handle));
      check(found != requests_.end(), "an event of request " + std::to_string(event.handle) + ", which has ended");
      SimRequest& request = *found->second;
      request.num_delivered = std::max(request.num_delivered, request.num_read + request.submission->stream->unread());
      if (event.kind == EventKind::kFinished) {
        finish(request);
      } else if (!request.is_slow) {
        read(request, SIZE_MAX);
      }
    }
  }
}

void Simulation::read(SimRequest& request, size_t most) {
  const Request& asked = request.submission->request;
  Text& text = request.text;
  for (int32_t tokens[64]; most > 0;) {
    size_t count = 0;
    const Status status = request.submission->stream->read(0, tokens, std::min<size_t>(most, 64), &count);
    if (status != Status::kOk) {
      check(status == Status::kTimeout || status == Status::kEnd, "a read failed");
      return;
    }
    most -= count;
    for (size_t i = 0; i < count; ++i) {
      const int32_t right = next_token(text.stamps.back(), text.tokens, request.num_prompt, asked, request.seed);
      if (tokens[i] != right) {
        fail(request, "output token " + std::to_string(request.num_read) + " is " + std::to_string(tokens[i]) +
                          " and should be " + std::to_string(right));
      }
      text.stamps.push_back(next_stamp(text.stamps, tokens[i], request.key));
      text.tokens.push_back(tokens[i]);
      ++request.num_read;
      ++totals_.tokens;
    }
    request.num_delivered = std::max(request.num_delivered, request.num_read);
  }
}

void Simulation::check_result(const SimRequest& request, const RequestResult& result) const {
  const size_t num_outputs = request.text.tokens.size() - request.num_prompt;
  const Request& asked = request.submission->request;
  const bool may_stop = num_outputs > 0 && num_outputs > static_cast<size_t>(asked.sampling.min_tokens);
  const int32_t last = request.text.tokens.back();
  const bool has_stop = !asked.stop_tokens.empty() && last == kStopId;
  bool is_right = result.output_tokens == static_cast<int32_t>(num_outputs) &&
                  result.prompt_tokens == static_cast<int32_t>(request.num_prompt - request.num_history) &&
                  result.seed == request.seed && result.cached_tokens < static_cast<int32_t>(request.num_prompt);
  if (request.salt >= kOwnSalt) {  // of nobody else
    is_right = is_right && result.cached_tokens <= static_cast<int32_t>(request.num_history);
  }
  switch (result.finish) {
    case FinishReason::kStop:
      is_right = is_right && may_stop && (has_stop || last == kEosToken) && result.stop_index == (has_stop ? 0 : -1);
      break;
    case FinishReason::kLength:
      is_right = is_right && request.text.tokens.size() == request.tokens_max &&
                 !(may_stop && (has_stop || last == kEosToken));
      break;
    case FinishReason::kCancelled:
      is_right = is_right && request.cancelled_ms > 0;
      break;
    case FinishReason::kDeadline: {
      const double deadline = request.submission->deadline_at_ms;
      const bool is_over = deadline <= step_begun_ms_ && deadline > step_before_ms_;
      const bool is_refused = shape_.refuses_early && deadline > step_begun_ms_;
      is_right = is_right && deadline > 0 && (is_over || is_refused);
      break;
    }
    case FinishReason::kError:
      is_right = is_right && (shape_.fails_on_overrun ? result.status == Status::kOverrun && request.is_slow : false);
      is_right = is_right || (result.status == SimulatedEngine::kLoadFailure && request.key.image != 0 &&
                              request.num_failed_loads < totals_.loads_failed);
      break;
    case FinishReason::kNone:
      is_right = false;
  }
  if (!is_right) {
    fail(request, std::string("a wrong end: ") + name_of(result.finish) + ", " + std::to_string(result.output_tokens) +
                      " tokens, " + result.message);
  }
}

void Simulation::finish(SimRequest& request) {
  read(request, SIZE_MAX);
  const RequestResult result = request.submission->stream->result();
  check_result(request, result);
  ++totals_.ends[static_cast<size_t>(result.finish)];
  if (request.session != nullptr) {
    SimSession& session = *request.session;
    session.is_busy = false;
    const bool may_drop = result.finish == FinishReason::kCancelled || result.finish == FinishReason::kError;
    if (!may_drop || !request.drops_turn) {
      session.text = std::move(request.text);
    }
    check(session.session->tokens == session.text.tokens, "a session has other tokens after a turn");
  }
  if (request.adapter != nullptr) {
    --request.adapter->in_flight;
    check(request.adapter->adapter->in_flight.load() <= request.adapter->in_flight, "in_flight is off");
  }
  active_.back()->place = request.place;
  active_[request.place] = active_.back();
  active_.pop_back();
  requests_.erase(request.number);
}

}  // namespace moelora::sim
