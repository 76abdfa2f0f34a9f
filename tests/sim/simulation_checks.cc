// SPDX-License-Identifier: Apache-2.0
// What must hold after a step, whatever has happened: nothing lost, nobody late, somebody gets on.
#include <algorithm>

#include "tests/sim/simulation.h"

namespace moelora::sim {

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

// Slots, pages and the host's copy are given up two steps after the last user has gone at the latest, or once what is
// on its way has ended.
void Simulation::check_unloaded() {
  std::erase_if(unloaded_, [&](SimUnloaded& one) {
    if (one.memory.expired()) {
      return true;
    }
    const auto has_it = [&](const auto& user) { return user->key.image == one.image; };
    const bool is_used =
        engine_->has_upload() || engine_->has_read() || std::any_of(adapters_.begin(), adapters_.end(), has_it) ||
        std::any_of(sessions_.begin(), sessions_.end(), has_it) || std::any_of(active_.begin(), active_.end(), has_it);
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
  if (engine_->has_upload() || engine_->has_read()) {
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
  totals.prefix_hit_tokens = stats.prefix_hit_tokens;
  totals.prefix_evictions = stats.prefix_evictions;
  totals.swaps = stats.swaps;
  totals.disk_loads = engine_->parts().adapters->host().loads;
  totals.host_evictions = engine_->parts().adapters->host().evictions;
  totals.rows = stats.prompt_tokens + stats.output_tokens;
  return totals;
}

}  // namespace moelora::sim
