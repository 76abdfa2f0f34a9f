// SPDX-License-Identifier: Apache-2.0
// Adapters and sessions of an engine, from the host's threads. The registry and idle sessions are guarded by the
// engine's lock; adapter slots are left to the engine thread.
#include <algorithm>

#include "runtime/engine/engine_parts.h"
#include "runtime/memory/host_resources.h"

namespace moelora {
namespace {

std::atomic<uint64_t> next_id{1};
constexpr int32_t kLoadThreadsMax = 12;

}  // namespace

AdapterLoadOptions Engine::adapter_load_options() const {
  AdapterLoadOptions options;
  options.max_rank = parts_->info.max_lora_rank;
  options.compute = parts_->options.compute;  // bf16 on a GPU: its kernels read bf16 streams only
  // On the CPU the steps need the cores.
  options.num_threads = parts_->info.is_cuda ? std::clamp(host_resources().num_cores * 3 / 4, 1, kLoadThreadsMax) : 1;
  options.cache = parts_->load_cache;
  const std::string& orientation = parts_->options.expert_orientation;
  if (orientation == "natural") {
    options.orientation = ExpertOrientation::kNatural;
  }
  if (orientation == "reversed") {
    options.orientation = ExpertOrientation::kReversed;
  }
  const std::string& layout = parts_->options.expert_b_layout;
  if (layout == "rank_major") {
    options.b_layout = ExpertBLayout::kRankMajor;
  }
  if (layout == "grouped_by_expert") {
    options.b_layout = ExpertBLayout::kGroupedByExpert;
  }
  return options;
}

std::shared_ptr<Adapter> Engine::register_adapter(const std::string& name, std::shared_ptr<const AdapterImage> image,
                                                  float scale, bool replace) {
  return register_adapter(name, std::make_shared<TieredImage>(std::move(image)), scale, replace);
}

std::shared_ptr<Adapter> Engine::register_adapter(const std::string& name, std::shared_ptr<TieredImage> image,
                                                  float scale, bool replace) {
  Parts& parts = *parts_;
  auto adapter = std::make_shared<Adapter>();
  adapter->id = next_id.fetch_add(1);
  adapter->name = name;
  adapter->scale = scale;
  adapter->image = std::move(image);
  const std::lock_guard<std::mutex> lock(parts.mutex);
  parts.check_alive();
  if (parts.draining) {
    throw Error(Status::kClosed, "the engine is draining: no new adapters");
  }
  if (!replace && parts.adapters->find(name) != nullptr) {
    throw Error(Status::kExists, "an adapter named '" + name + "' is loaded; unload it or load with REPLACE");
  }
  adapter->generation = adapter->image->adapters.empty() ? adapter->id : adapter->image->adapters.front()->generation;
  parts.adapters->add(adapter);
  if (parts.options.audit >= 1) {
    parts.audit_parts();
  }
  return adapter;
}

Engine::AdapterPlace Engine::adapter_place(const Adapter& adapter) const {
  const std::lock_guard<std::mutex> lock(parts_->mutex);
  const TieredImage& image = *adapter.image;
  return {image.host != nullptr, image.bytes_uploaded.load(), image.fingerprint, image.pack_ms};
}

std::shared_ptr<Adapter> Engine::find_adapter(const std::string& name) const {
  const std::lock_guard<std::mutex> lock(parts_->mutex);
  return parts_->adapters->find(name);
}

std::vector<std::shared_ptr<Adapter>> Engine::list_adapters() const {
  const std::lock_guard<std::mutex> lock(parts_->mutex);
  return parts_->adapters->list();
}

void Engine::unload_adapter(const std::shared_ptr<Adapter>& adapter, bool if_idle) {
  {
    const std::lock_guard<std::mutex> lock(parts_->mutex);
    if (if_idle && adapter->in_flight.load() > 0) {
      throw Error(Status::kBusy, "adapter '" + adapter->name + "' has " + std::to_string(adapter->in_flight.load()) +
                                     " requests in flight");
    }
    adapter->unloaded.store(true);
    parts_->adapters->remove(*adapter);
    parts_->drop_prefix(*adapter);
    parts_->collect_adapters = true;
    if (parts_->options.audit >= 1) {
      parts_->audit_parts();
    }
  }
  parts_->wake();
}

void Engine::set_weight(const std::shared_ptr<Adapter>& adapter, double weight) {
  if (!(weight >= 1e-3 && weight <= 1e3)) {
    throw Error(Status::kInvalid, "weight " + std::to_string(weight) + " is outside [0.001, 1000]");
  }
  const std::lock_guard<std::mutex> lock(parts_->mutex);
  (adapter == nullptr ? parts_->scheduler->base_share() : adapter->share).weight = weight;
}

void Engine::prefetch_adapter(const std::shared_ptr<Adapter>& adapter, std::shared_ptr<CompletionQueue> queue,
                              uint64_t handle, uint64_t tag) {
  {
    const std::lock_guard<std::mutex> lock(parts_->mutex);
    parts_->check_alive();
    if (adapter->unloaded.load()) {
      throw Error(Status::kNotFound, "adapter '" + adapter->name + "' was unloaded");
    }
    parts_->note_queue(queue);
    parts_->prefetches.push_back({adapter, std::move(queue), handle, tag});
  }
  parts_->wake();
}

std::shared_ptr<Session> Engine::create_session(std::shared_ptr<Adapter> adapter, float scale) {
  Parts& parts = *parts_;
  auto session = std::make_shared<Session>();
  session->id = next_id.fetch_add(1);
  session->adapter = std::move(adapter);
  session->scale = scale;
  session->tokens.reserve(static_cast<size_t>(parts.info.max_context_tokens));
  session->kv =
      std::make_shared<KvSequence>(*parts.pool, parts.geometry, parts.info.max_context_tokens, parts.prefix.get());
  const std::lock_guard<std::mutex> lock(parts.mutex);
  parts.check_alive();
  if (session->adapter != nullptr && session->adapter->unloaded.load()) {
    throw Error(Status::kNotFound, "adapter '" + session->adapter->name + "' was unloaded");
  }
  parts.scheduler->add_session(session);
  return session;
}

std::shared_ptr<Session> Engine::fork_session(const std::shared_ptr<Session>& session) {
  std::shared_ptr<Session> fork = create_session(session->adapter, session->scale);
  const std::lock_guard<std::mutex> lock(parts_->mutex);
  if (session->busy.load()) {
    parts_->scheduler->remove_session(*fork);
    throw Error(Status::kBusy, "the session has a running request");
  }
  fork->tokens.assign(session->tokens.begin(), session->tokens.end());
  fork->kv->fork_from(parts_->geometry, *session->kv);
  return fork;
}

void Engine::rollback_session(const std::shared_ptr<Session>& session, int64_t num_tokens) {
  const std::lock_guard<std::mutex> lock(parts_->mutex);
  if (session->busy.load()) {
    throw Error(Status::kBusy, "the session has a running request");
  }
  if (num_tokens < 0 || num_tokens > static_cast<int64_t>(session->tokens.size())) {
    throw Error(Status::kInvalid, "rollback to " + std::to_string(num_tokens) + " tokens: the session has " +
                                      std::to_string(session->tokens.size()));
  }
  session->tokens.resize(static_cast<size_t>(num_tokens));
  session->kv->truncate(parts_->geometry, static_cast<int32_t>(num_tokens));
}

void Engine::close_session(const std::shared_ptr<Session>& session) {
  const std::lock_guard<std::mutex> lock(parts_->mutex);
  session->closed.store(true);
  parts_->scheduler->remove_session(*session);
  if (!session->busy.load()) {
    session->kv->truncate(parts_->geometry, 0);
  }
}

Engine::SessionInfo Engine::session_info(const std::shared_ptr<Session>& session) const {
  const std::lock_guard<std::mutex> lock(parts_->mutex);
  SessionInfo info;
  info.busy = session->busy.load();
  info.num_tokens = static_cast<int64_t>(session->tokens.size());
  info.num_computed = session->kv->length;
  info.num_blocks = session->kv->pages.size() / parts_->geometry.layout.num_groups;
  info.resident = session->kv->length > 0 || info.num_tokens == 0;
  return info;
}

}  // namespace moelora
