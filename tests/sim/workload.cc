// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/workload.h"

#include <algorithm>
#include <cmath>

namespace moelora::sim {

const std::vector<Shape>& shapes() {
  static const std::vector<Shape> all = [] {
    Shape small;
    small.name = "small";
    Shape beside = small;
    beside.name = "beside";
    beside.asynchronous = true;
    // Hardly room for one sequence beside its adapter.
    Shape tight = small;
    tight.name = "tight";
    tight.num_pages = 40;
    tight.prompt_mean = 60;
    tight.output_mean = 40;
    tight.slots = 3;
    tight.active = 16;
    tight.queue = 24;
    // What the host has pinned leaves some of it.
    Shape pinned = tight;
    pinned.name = "pinned";
    pinned.num_pages = 26;
    pinned.slots = 2;
    Shape many = small;
    many.name = "many";
    many.num_pages = 4096;
    many.slots = 64;
    many.sequences = 32;
    many.batch_tokens = 256;
    many.queue = 512;
    many.context = 512;
    many.names = 3000;
    many.granules_max = 48;
    many.sessions = 64;
    many.active = 160;
    many.prefetched = 8;
    many.folders = 900;
    many.host_granules = 3000;
    // Pages of 128 KiB, four to a block.
    Shape groups = small;
    groups.name = "groups";
    groups.layers = 8;
    groups.num_pages = 256;
    groups.granules_max = 640;
    groups.asynchronous = true;
    groups.swap_pages = 64;
    Shape talk = small;
    talk.name = "talk";
    talk.sessions = 40;
    talk.names = 6;
    talk.num_pages = 160;
    talk.output_mean = 30;
    Shape overrun = small;
    overrun.name = "overrun";
    overrun.fails_on_overrun = true;
    overrun.asynchronous = true;
    // Preempted requests go to host memory, adapters take turns, and who would be late is refused.
    Shape swap = tight;
    swap.name = "swap";
    swap.num_pages = 64;
    swap.swap_pages = 48;
    swap.is_fair = true;
    swap.prefix_cache = false;
    Shape fair = small;
    fair.name = "fair";
    fair.num_pages = 160;
    fair.swap_pages = 256;
    fair.is_fair = true;
    fair.refuses_early = true;
    fair.asynchronous = true;
    // Host memory for a tenth of the adapters.
    Shape tiers = small;
    tiers.name = "tiers";
    tiers.names = 200;
    tiers.folders = 970;
    tiers.host_granules = 240;
    tiers.zipf = 0.7;
    return std::vector<Shape>{small, beside, tight, pinned, many, groups, talk, overrun, swap, fair, tiers};
  }();
  return all;
}

const Shape* find_shape(const std::string& name) {
  const auto found = std::find_if(shapes().begin(), shapes().end(), [&](const Shape& one) { return one.name == name; });
  return found == shapes().end() ? nullptr : &*found;
}

int64_t Random::geometric(int64_t mean) {
  return 1 + static_cast<int64_t>(-std::log(1.0 - unit()) * static_cast<double>(std::max<int64_t>(mean - 1, 0)));
}

Workload::Workload(const Shape& shape, uint64_t seed)
    : shape_(shape), random_(seed), loaded_(static_cast<size_t>(shape.names), -1) {
  double sum = 0;
  for (int64_t rank = 1; rank <= shape.names; ++rank) {
    sum += std::pow(static_cast<double>(rank), -shape.zipf);
    cumulative_.push_back(sum);
  }
}

int64_t Workload::zipf() {
  const double at = random_.unit() * cumulative_.back();
  return std::min<int64_t>(std::lower_bound(cumulative_.begin(), cumulative_.end(), at) - cumulative_.begin(),
                           shape_.names - 1);
}

void Workload::choose_phase() {
  phase_ = Phase();
  phase_.events = 50 + random_.below(1500);
  switch (random_.below(8)) {
    case 0:  // a burst
      phase_.come = 1000;
      phase_.events = 20 + random_.below(100);
      break;
    case 1:  // quiet
      phase_.come = 20;
      break;
    case 2:  // adapters come and go
      phase_.churn = 200;
      break;
    case 3:  // uploads crawl
      phase_.upload = 15;
      break;
    case 4:  // readers stop
      phase_.slow = 700;
      break;
    case 5:  // many cancels
      phase_.go = 150;
      break;
    case 6:
      phase_.pins = 60;
      break;
    default:
      break;
  }
}

Event Workload::load_event(int64_t name) {
  Event event{EventType::kLoad,
              {num_adapters_, name, random_.geometric(shape_.granules_max / 3), some_permille(),
               random_.chance(shape_.folders) ? 1 : 0}};
  event.fields[2] = std::min(event.fields[2], shape_.granules_max);
  loaded_[static_cast<size_t>(name)] = num_adapters_++;
  return event;
}

Event Workload::request_event(const Simulation& simulation) {
  const int64_t number = num_requests_++;
  const int64_t text = zipf() % 16;
  const int64_t prompt = std::min(random_.geometric(shape_.prompt_mean), shape_.context + 4);
  const int64_t own = random_.chance(600) ? random_.below(std::min<int64_t>(prompt, 12) + 1) : prompt;
  const int64_t most = std::min(random_.geometric(shape_.output_mean), shape_.context);
  const int64_t priority = random_.chance(900) ? 0 : random_.below(5) - 2;
  const int64_t deadline = random_.chance(900) ? 0 : random_.geometric(60);
  int64_t flags = random_.chance(phase_.slow) ? int64_t{kSlowReader} : 0;
  for (const int64_t flag : {kTemperature, kPenalty, kStopToken, kMinTokens, kCapture}) {
    flags |= random_.chance(60) ? flag : 0;
  }
  const int64_t salt = random_.chance(800) ? 0 : random_.chance(500) ? kOwnSalt + number : 1 + random_.below(2);
  const auto& sessions = simulation.sessions();
  if (!sessions.empty() && random_.chance(300)) {
    const auto& session = sessions[static_cast<size_t>(random_.below(static_cast<int64_t>(sessions.size())))];
    return {EventType::kTurn, {number, session->number, text, prompt, own, most, priority, deadline, flags, salt}};
  }
  int64_t adapter = -1;
  if (random_.chance(850)) {
    const int64_t name = zipf();
    adapter = loaded_[static_cast<size_t>(name)];
    if (adapter < 0) {
      --num_requests_;
      return load_event(name);
    }
  }
  return {EventType::kSubmit,
          {number, adapter, some_permille(), text, prompt, own, most, priority, deadline, flags, salt}};
}

Event Workload::some_adapter_event(const Simulation& simulation) {
  const auto& adapters = simulation.adapters();
  if (adapters.empty()) {
    return load_event(zipf());
  }
  const SimAdapter& some = *adapters[static_cast<size_t>(random_.below(static_cast<int64_t>(adapters.size())))];
  const int64_t name = zipf();
  switch (random_.below(6)) {
    case 0:
      return load_event(name);  // perhaps in the place of one in use
    case 1:
      return {EventType::kPrefetch, {some.number}};
    case 2:
      if (static_cast<int64_t>(adapters.size()) < 2 * shape_.names) {
        loaded_[static_cast<size_t>(name)] = num_adapters_;
        return {EventType::kClone, {num_adapters_++, name, some.number, some_permille()}};
      }
      break;
    default:
      break;
  }
  std::replace(loaded_.begin(), loaded_.end(), some.number, int64_t{-1});
  const int64_t if_idle = random_.chance(300) ? 1 : 0;
  if (if_idle != 0 && some.in_flight > 0) {  // it stays
    loaded_[static_cast<size_t>(name)] = some.number;
  }
  return {EventType::kUnload, {some.number, if_idle}};
}

Event Workload::some_session_event(const Simulation& simulation) {
  const auto& sessions = simulation.sessions();
  const auto count = static_cast<int64_t>(sessions.size());
  if (count == 0 || (count < shape_.sessions && random_.chance(500))) {
    const int64_t adapter = random_.chance(300) ? -1 : loaded_[static_cast<size_t>(zipf())];
    return {EventType::kOpen, {num_sessions_++, adapter, some_permille()}};
  }
  const SimSession& some = *sessions[static_cast<size_t>(random_.below(count))];
  switch (random_.below(4)) {
    case 0:
      return {EventType::kRollback, {some.number, random_.below(1001)}};
    case 1:
      if (count < shape_.sessions) {
        return {EventType::kFork, {num_sessions_++, some.number}};
      }
      break;
    default:
      break;
  }
  return {EventType::kClose, {some.number}};
}

Event Workload::next(const Simulation& simulation) {
  if (--phase_.events < 0) {
    choose_phase();
  }
  if (simulation.has_upload() && random_.chance(phase_.upload)) {
    return {EventType::kUpload, {random_.chance(5) ? 1 : 0}};
  }
  if (simulation.has_read() && random_.chance(phase_.upload)) {
    return {EventType::kDisk, {random_.chance(5) ? 1 : 0}};
  }
  const auto& active = simulation.active();
  const auto num_active = static_cast<int64_t>(active.size());
  if (random_.chance(phase_.step)) {
    return {EventType::kStep, {random_.below(3000)}};
  }
  if (num_active > 0 && random_.chance(phase_.go)) {
    const SimRequest& some = *active[static_cast<size_t>(random_.below(num_active))];
    return {EventType::kCancel, {some.number, random_.chance(500) ? 1 : 0}};
  }
  if (num_active > 0 && random_.chance(200)) {
    const SimRequest& some = *active[static_cast<size_t>(random_.below(num_active))];
    if (some.is_slow) {
      return {EventType::kRead, {some.number, random_.geometric(6)}};
    }
  }
  if (random_.chance(phase_.churn)) {
    return some_adapter_event(simulation);
  }
  if (random_.chance(40)) {
    return some_session_event(simulation);
  }
  if (!pinned_.empty() && random_.chance(10 + 20 * static_cast<int64_t>(pinned_.size()))) {
    std::swap(pinned_[static_cast<size_t>(random_.below(static_cast<int64_t>(pinned_.size())))], pinned_.back());
    const int64_t adapter = pinned_.back();
    pinned_.pop_back();
    return {EventType::kUnpin, {adapter}};
  }
  if (random_.chance(phase_.pins) && !simulation.adapters().empty()) {
    const int64_t adapter = loaded_[static_cast<size_t>(zipf())];
    if (adapter >= 0) {
      pinned_.push_back(adapter);
      return {EventType::kPin, {adapter}};
    }
  }
  if (random_.chance(1)) {
    return random_.chance(100) ? Event{EventType::kSettle, {random_.chance(250) ? 1 : 0}}
                               : Event{EventType::kTrim, {random_.below(1001)}};
  }
  const int64_t aim = shape_.active * (phase_.come > 900 ? 2 : 1);
  if (num_active < aim && random_.chance(phase_.come)) {
    return request_event(simulation);
  }
  return {EventType::kStep, {random_.below(3000)}};
}

}  // namespace moelora::sim
