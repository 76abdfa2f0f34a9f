// SPDX-License-Identifier: Apache-2.0
// Adapters, sessions and the order of events; requests are in simulation_requests.cc.
#include "tests/sim/simulation.h"

#include <algorithm>

namespace moelora::sim {
namespace {

// What stands in a full audit's way of every step's cost: nothing of it grows with the events before.
constexpr int64_t kAuditEveryStep = 2;  // option `audit`

}  // namespace

Simulation::Simulation(const Shape& shape, int64_t audit_every, const std::string& model_dir)
    : shape_(shape),
      audit_every_(audit_every),
      engine_(std::make_unique<SimulatedEngine>(shape, audit_every == 1 ? kAuditEveryStep : 0, model_dir)) {}

Simulation::~Simulation() = default;

template <class Numbered>
std::shared_ptr<Numbered> Simulation::find(const std::vector<std::shared_ptr<Numbered>>& all, int64_t number) {
  const auto found = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one->number == number; });
  return found == all.end() ? nullptr : *found;
}

void Simulation::apply(const Event& event) {
  ++totals_.events;
  const auto& at = event.fields;
  const auto adapter = [&] { return find(adapters_, at[0]); };
  const auto session = [&] { return find(sessions_, at[0]); };
  const auto request = [&] {
    const auto found = requests_.find(at[0]);
    return found == requests_.end() ? nullptr : found->second.get();
  };
  switch (event.type) {
    case EventType::kStep:
      step(at[0]);
      break;
    case EventType::kSubmit:
      submit(event, false);
      break;
    case EventType::kTurn:
      submit(event, true);
      break;
    case EventType::kCancel:
      if (SimRequest* one = request()) {
        cancel(*one, at[1] != 0);
      }
      break;
    case EventType::kRead:
      if (SimRequest* one = request()) {
        read(*one, static_cast<size_t>(at[1]));
      }
      break;
    case EventType::kLoad:
      load(at[0], at[1], at[2], at[3], nullptr);
      break;
    case EventType::kClone:
      if (const auto source = find(adapters_, at[2])) {
        load(at[0], at[1], 0, at[3], source.get());
      }
      break;
    case EventType::kUnload:
      if (const auto one = adapter()) {
        unload(one, at[1] != 0);
      }
      break;
    case EventType::kPin:
      if (const auto one = adapter()) {
        pin(*one, 1);
      }
      break;
    case EventType::kUnpin:
      if (const auto one = adapter()) {
        pin(*one, -1);
      }
      break;
    case EventType::kPrefetch:
      if (const auto one = adapter()) {
        queue_->expect(1);
        engine_->prefetch_adapter(one->adapter, queue_, 0, static_cast<uint64_t>(one->number));
        ++num_prefetches_;
      }
      break;
    case EventType::kOpen:
      open_session(at[0], find(adapters_, at[1]), at[2]);
      break;
    case EventType::kFork:
      if (const auto source = find(sessions_, at[1])) {
        fork_session(at[0], *source);
      }
      break;
    case EventType::kRollback:
      if (const auto one = session()) {
        rollback(*one, at[1]);
      }
      break;
    case EventType::kClose:
      if (const auto one = session()) {
        close_session(one);
      }
      break;
    case EventType::kTrim:
      engine_->trim(static_cast<uint64_t>(shape_.num_pages * at[0] / 1000 * engine_->info().page_bytes));
      break;
    case EventType::kUpload:
      if (engine_->has_upload()) {
        upload(at[0] != 0);
      }
      break;
    case EventType::kSettle:
      settle(at[0] != 0);
      break;
  }
}

void Simulation::step(int64_t microseconds) {
  pass_time(static_cast<double>(microseconds) / 1e3);
  step_before_ms_ = step_begun_ms_;
  step_begun_ms_ = simulated_ms();
  const uint64_t tokens_before = totals_.tokens + totals_.requests - active_.size();
  const bool ran = engine_->step();
  ++totals_.steps;
  collect_events();
  check_progress(ran, tokens_before);
  if (totals_.steps % static_cast<uint64_t>(audit_every_) == 0) {
    check_counters();
  }
  if (totals_.steps % 8 == 0) {
    check_unloaded();
  }
  if (totals_.steps % static_cast<uint64_t>(std::max<int64_t>(audit_every_, 64)) == 0) {
    audit_all();
  }
}

void Simulation::upload(bool fails) {
  totals_.uploads_failed += fails ? 1 : 0;
  engine_->let_upload_pass(fails);
}

void Simulation::load(int64_t number, int64_t name, int64_t granules, int64_t permille, const SimAdapter* source) {
  auto made = std::make_shared<SimAdapter>();
  made->number = number;
  const int64_t page_bytes = engine_->info().page_bytes;
  std::shared_ptr<const AdapterImage> image;
  if (source != nullptr) {
    image = source->adapter->image;
    made->key.image = source->key.image;
  } else {
    made->key.image = static_cast<uint64_t>(number) + 1;
    image = make_image(made->key.image, static_cast<int32_t>(granules), page_bytes);
  }
  made->key.num_pages =
      static_cast<int32_t>((static_cast<int64_t>(image->stream.size()) + page_bytes - 1) / page_bytes);
  made->key.scale = static_cast<float>(permille) / 1000.0f;
  made->adapter = engine_->register_adapter("a" + std::to_string(name), std::move(image), made->key.scale, true);
  names_[name] = made;
  adapters_.push_back(made);
  check(engine_->find_adapter(made->adapter->name) == made->adapter, "another adapter has the name");
}

void Simulation::unload(const std::shared_ptr<SimAdapter>& adapter, bool if_idle) {
  try {
    engine_->unload_adapter(adapter->adapter, if_idle);
  } catch (const Error& error) {
    check(error.status() == Status::kBusy && if_idle && adapter->in_flight > 0, error.what());
    return;
  }
  adapter->is_unloaded = true;
  unloaded_.push_back({adapter->key.image, adapter->adapter->image, 0});
  std::erase(adapters_, adapter);
  const auto is_it = [&](const auto& named) { return named.second == adapter; };
  if (const auto named = std::find_if(names_.begin(), names_.end(), is_it); named != names_.end()) {
    check(engine_->find_adapter(adapter->adapter->name) == nullptr, "an unloaded adapter kept its name");
    names_.erase(named);
  }
}

// As the C API does it.
void Simulation::pin(SimAdapter& adapter, int64_t count) {
  if (adapter.pins + count < 0) {
    return;
  }
  adapter.pins += count;
  adapter.adapter->pins += static_cast<int32_t>(count);
  engine_->notify();
}

void Simulation::open_session(int64_t number, const std::shared_ptr<SimAdapter>& adapter, int64_t permille) {
  auto made = std::make_shared<SimSession>();
  made->number = number;
  made->adapter = adapter;
  const float scale = static_cast<float>(permille) / 1000.0f;
  made->session = engine_->create_session(adapter == nullptr ? nullptr : adapter->adapter, scale);
  if (adapter != nullptr) {
    made->key = adapter->key;
    made->key.scale = adapter->key.scale * scale;
  }
  sessions_.push_back(std::move(made));
}

void Simulation::fork_session(int64_t number, const SimSession& source) {
  if (source.is_busy || (source.adapter != nullptr && source.adapter->is_unloaded)) {
    return;
  }
  auto made = std::make_shared<SimSession>(source);
  made->number = number;
  made->session = engine_->fork_session(source.session);
  check(made->session->tokens == source.text.tokens, "a fork has other tokens");
  sessions_.push_back(std::move(made));
}

void Simulation::rollback(SimSession& session, int64_t permille) {
  if (session.is_busy) {
    return;
  }
  const size_t kept = session.text.tokens.size() * static_cast<size_t>(permille) / 1000;
  engine_->rollback_session(session.session, static_cast<int64_t>(kept));
  session.text.tokens.resize(kept);
  session.text.stamps.resize(kept);
  const Engine::SessionInfo info = engine_->session_info(session.session);
  check(info.num_tokens == static_cast<int64_t>(kept) && info.num_computed <= info.num_tokens, "a rollback went wrong");
}

void Simulation::close_session(const std::shared_ptr<SimSession>& session) {
  engine_->close_session(session->session);
  session->is_closed = true;
  std::erase(sessions_, session);
}

void Simulation::settle(bool close_all) {
  ++totals_.settled;
  for (const auto& adapter : adapters_) {
    pin(*adapter, -adapter->pins);
  }
  for (SimRequest* request : active_) {
    request->is_slow = false;
  }
  if (close_all) {
    while (!sessions_.empty()) {
      close_session(sessions_.back());
    }
    while (!adapters_.empty()) {
      unload(adapters_.back(), false);
    }
  }
  engine_->trim(0);
  const auto is_busy = [&] { return !active_.empty() || engine_->has_upload() || num_prefetches_ > 0; };
  const size_t most = (active_.size() + 1) * static_cast<size_t>(shape_.context) * 4;
  for (size_t steps = 0; is_busy(); ++steps) {
    check(steps < most, "does not settle: " + std::to_string(active_.size()) + " requests are left");
    for (size_t i = active_.size(); i-- > 0;) {
      read(*active_[i], SIZE_MAX);
    }
    if (engine_->has_upload()) {
      upload(false);
    }
    step(1000);
  }
  engine_->trim(0);
  step(0);
  step(0);
  check(engine_->parts().pool->num_free() == shape_.num_pages, "pages are lost");
  check(engine_->parts().adapters->num_resident() == 0, "an adapter stayed");
  check(!close_all || engine_->parts().adapters->host_bytes() == 0, "host copies stayed");
  audit_all();
}

void Simulation::audit_all() {
  std::vector<std::shared_ptr<Session>> held;
  for (const auto& session : sessions_) {
    held.push_back(session->session);
    check(session->is_busy || session->session->tokens == session->text.tokens, "a session has other tokens");
  }
  engine_->audit_all(held);
  for (const SimRequest* request : active_) {
    const Submission& submission = *request->submission;
    if (submission.deadline_at_ms > 0 && submission.deadline_at_ms <= step_before_ms_) {
      fail(*request, "its deadline passed and it did not end");
    }
    if (request->cancelled_ms > 0 && request->cancelled_ms < step_before_ms_) {
      fail(*request, "it was cancelled and did not end");
    }
  }
}

// Slots, pages and the host's copy are given up two steps after the last user has gone at the latest, or once an upload
// on its way has ended.
void Simulation::check_unloaded() {
  std::erase_if(unloaded_, [&](SimUnloaded& one) {
    if (one.memory.expired()) {
      return true;
    }
    const auto has_it = [&](const auto& user) { return user->key.image == one.image; };
    const bool is_used = engine_->has_upload() || std::any_of(adapters_.begin(), adapters_.end(), has_it) ||
                         std::any_of(sessions_.begin(), sessions_.end(), has_it) ||
                         std::any_of(active_.begin(), active_.end(), has_it);
    one.unused_since = is_used ? 0 : one.unused_since == 0 ? totals_.steps : one.unused_since;
    check(is_used || totals_.steps < one.unused_since + 3,
          "image " + std::to_string(one.image) + " was unloaded and stays");
    return false;
  });
}

void Simulation::check_counters() const {
  const EngineStats stats = engine_->stats();
  check(stats.requests_submitted == totals_.requests, "requests_submitted is off");
  check(stats.requests_finished <= totals_.requests && stats.requests_finished + active_.size() >= totals_.requests,
        "requests_finished is off");
  check(stats.running + stats.waiting == static_cast<int64_t>(stats.requests_submitted - stats.requests_finished),
        "requests were lost or doubled");
  check(stats.adapters_registered == static_cast<int64_t>(adapters_.size()), "adapters_registered is off");
  check(stats.sessions == static_cast<int64_t>(sessions_.size()), "sessions is off");
  check(stats.adapters_resident <= shape_.slots, "more adapters than slots");
}

// Where nothing is on its way and somebody could run alone, somebody does.
bool Simulation::must_progress() const {
  if (engine_->has_upload()) {
    return false;
  }
  int64_t pinned_pages = 0;
  int64_t pinned_slots = 0;
  for (size_t i = 0; i < adapters_.size(); ++i) {
    const auto is_same = [&](const auto& other) {
      return other->key.image == adapters_[i]->key.image && other->pins > 0;
    };
    const auto before = adapters_.begin() + static_cast<std::ptrdiff_t>(i);
    if (adapters_[i]->pins > 0 && std::none_of(adapters_.begin(), before, is_same)) {
      pinned_pages += adapters_[i]->key.num_pages;
      ++pinned_slots;
    }
  }
  return std::any_of(active_.begin(), active_.end(), [&](const SimRequest* request) {
    const bool adapted = request->key.image != 0 && request->key.scale != 0.0f;
    const int64_t pages = engine_->parts().geometry.pages(static_cast<int64_t>(request->tokens_max)) +
                          (adapted ? request->key.num_pages : 0) + pinned_pages;
    const size_t unread = request->num_delivered - request->num_read;
    return unread + 1 < static_cast<size_t>(shape_.buffer) && pages <= shape_.num_pages &&
           (!adapted || pinned_slots < shape_.slots);
  });
}

void Simulation::check_progress(bool ran, uint64_t tokens_before) {
  const bool progress = totals_.tokens + totals_.requests - active_.size() != tokens_before;
  idle_steps_ = ran || progress || !must_progress() ? 0 : idle_steps_ + 1;
  steps_without_token_ = progress || !must_progress() ? 0 : steps_without_token_ + 1;
  totals_.idle_steps_max = std::max(totals_.idle_steps_max, idle_steps_);
  totals_.steps_without_token_max = std::max(totals_.steps_without_token_max, steps_without_token_);
  constexpr uint64_t kIdleStepsMax = 8;
  // Everybody who runs may have to compute its context again.
  const auto chunks = static_cast<uint64_t>(shape_.context / shape_.batch_tokens + 1);
  const uint64_t most = 8 + 2 * chunks * static_cast<uint64_t>(shape_.sequences);
  if (idle_steps_ > kIdleStepsMax) {
    fail("nobody runs, though somebody could" + state());
  }
  if (steps_without_token_ > most) {
    fail(std::to_string(most) + " steps gave no token" + state());
  }
}

std::string Simulation::state() const {
  Engine::Parts& parts = engine_->parts();
  const PagePool& pool = *parts.pool;
  std::string text = "\n  pages: " + std::to_string(pool.num_free()) + " free, " +
                     std::to_string(pool.num_used(PageUse::kKv)) + " of KV, " +
                     std::to_string(pool.num_used(PageUse::kAdapter)) + " of adapters";
  int64_t left = 12;
  for (const auto* list : {&parts.scheduler->running(), &parts.scheduler->waiting()}) {
    for (const auto& sequence : *list) {
      if (--left < 0) {
        break;
      }
      const Request& request = sequence->request();
      text += std::string(list == &parts.scheduler->running() ? "\n  running: " : "\n  waiting: ") +
              std::to_string(sequence->num_tokens()) + " tokens, " + std::to_string(sequence->kv->length) +
              " computed, " + std::to_string(sequence->kv->pages.size()) + " pages, " +
              std::to_string(sequence->num_unread()) + " unread, slot " + std::to_string(sequence->slot) +
              (request.session != nullptr ? ", of a session" : "");
      if (request.adapter != nullptr) {
        text += ", adapter of " + std::to_string(parts.adapters->pages_of(*request.adapter->image)) + " pages, " +
                std::to_string(request.adapter->pins.load()) + " pins, scale " + std::to_string(sequence->row_scale);
      }
    }
  }
  for (const auto& adapter : adapters_) {
    if (adapter->pins > 0 || adapter->adapter->slot.load() > 0) {
      text += "\n  adapter " + std::to_string(adapter->number) + ": " + std::to_string(adapter->key.num_pages) +
              " pages, " + std::to_string(adapter->pins) + " pins, slot " +
              std::to_string(adapter->adapter->slot.load());
    }
  }
  return text;
}

SimTotals Simulation::totals() const {
  SimTotals totals = totals_;
  const EngineStats stats = engine_->stats();
  totals.loads = stats.adapter_loads;
  totals.evictions = stats.adapter_evictions;
  totals.hits = stats.adapter_hits;
  totals.preemptions = stats.preemptions;
  totals.sessions_evicted = stats.sessions_evicted;
  totals.rows = stats.prompt_tokens + stats.output_tokens;
  return totals;
}

}  // namespace moelora::sim
