// SPDX-License-Identifier: Apache-2.0
// Adapters, sessions and the order of events; requests are in simulation_requests.cc, what must hold after a step in
// simulation_checks.cc.
#include "tests/sim/simulation.h"

#include <algorithm>

namespace moelora::sim {
namespace {

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
      load(at[0], at[1], at[2], at[3], at[4] != 0, nullptr);
      break;
    case EventType::kClone:
      if (const auto source = find(adapters_, at[2])) {
        load(at[0], at[1], 0, at[3], false, source.get());
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
    case EventType::kDisk:
      if (engine_->has_read()) {
        read_disk(at[0] != 0);
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
  totals_.loads_failed += fails ? 1 : 0;
  engine_->let_upload_pass(fails);
}

void Simulation::read_disk(bool fails) {
  totals_.loads_failed += fails ? 1 : 0;
  engine_->let_read_pass(fails);
}

void Simulation::load(int64_t number, int64_t name, int64_t granules, int64_t permille, bool has_folder,
                      const SimAdapter* source) {
  auto made = std::make_shared<SimAdapter>();
  made->number = number;
  const int64_t page_bytes = engine_->info().page_bytes;
  std::shared_ptr<TieredImage> image;
  if (source != nullptr) {
    image = source->adapter->image;
    made->key.image = source->key.image;
  } else {
    made->key.image = static_cast<uint64_t>(number) + 1;
    image = std::make_shared<TieredImage>(
        make_image(made->key.image, static_cast<int32_t>(granules), page_bytes, has_folder));
  }
  made->key.num_pages = static_cast<int32_t>((static_cast<int64_t>(image->stream_bytes) + page_bytes - 1) / page_bytes);
  made->key.scale = static_cast<float>(permille) / 1000.0f;
  try {
    made->adapter = engine_->register_adapter(std::to_string(name), std::move(image), made->key.scale, true);
  } catch (const Error& error) {
    check(error.status() == Status::kNomem && shape_.host_granules > 0, error.what());
    return;
  }
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
  const auto is_busy = [&] {
    return !active_.empty() || engine_->has_upload() || engine_->has_read() || num_prefetches_ > 0;
  };
  const size_t most = (active_.size() + 1) * static_cast<size_t>(shape_.context) * 4;
  for (size_t steps = 0; is_busy(); ++steps) {
    check(steps < most, "does not settle: " + std::to_string(active_.size()) + " requests are left");
    for (size_t i = active_.size(); i-- > 0;) {
      read(*active_[i], SIZE_MAX);
    }
    if (engine_->has_read()) {
      read_disk(false);
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
  check(!close_all || engine_->parts().adapters->host().bytes == 0, "host copies stayed");
  audit_all();
}

}  // namespace moelora::sim
