// SPDX-License-Identifier: Apache-2.0
// The engine as any thread of the host sees it: requests, state, waiting. Nothing here touches the device.
#include <algorithm>
#include <random>

#include <fmt/format.h>

#include "runtime/engine/engine_parts.h"

namespace moelora {
namespace {

uint64_t choose_seed() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32 | device()) | 1;  // 0 means "choose"
}

void check_tokens(const std::vector<int32_t>& tokens, const char* what, int32_t vocab_size) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= vocab_size) {
      throw Error(Status::kInvalid, std::string(what) + " " + std::to_string(i) + ": token id " +
                                        std::to_string(tokens[i]) + " is outside the vocabulary of " +
                                        std::to_string(vocab_size));
    }
  }
}

void check_range(const char* name, double value, double low, double high) {
  if (!(value >= low && value <= high)) {
    throw Error(Status::kInvalid, fmt::format("sampling.{} = {} is outside [{}, {}]", name, value, low, high));
  }
}

void check_sampling(const Sampling& sampling) {
  check_range("temperature", sampling.temperature, 0, 1e4);
  check_range("top_k", sampling.top_k, 0, 2147483647.0);
  check_range("top_p", sampling.top_p, 1e-9, 1);
  check_range("min_p", sampling.min_p, 0, 1);
  check_range("repetition_penalty", sampling.repetition_penalty, 1e-3, 1e3);
  check_range("presence_penalty", sampling.presence_penalty, -1e3, 1e3);
  check_range("frequency_penalty", sampling.frequency_penalty, -1e3, 1e3);
  check_range("max_tokens", sampling.max_tokens, 1, 2147483647.0);
  check_range("min_tokens", sampling.min_tokens, 0, sampling.max_tokens);
  check_range("logprobs", sampling.logprobs, -1, kMaxTopLogprobs);
}

}  // namespace

const EngineInfo& Engine::info() const {
  return parts_->info;
}
const EngineOptions& Engine::options() const {
  return parts_->options;
}

EngineStats Engine::stats() const {
  const Parts& parts = *parts_;
  const std::lock_guard<std::mutex> lock(parts.mutex);
  EngineStats stats = parts.counters;
  stats.running = static_cast<int64_t>(parts.scheduler->running().size());
  stats.waiting = static_cast<int64_t>(parts.scheduler->waiting().size() + parts.inbox.size());
  stats.sessions = static_cast<int64_t>(parts.scheduler->num_sessions());
  stats.preemptions = parts.scheduler->counters().preemptions;
  stats.sessions_evicted = parts.scheduler->counters().sessions_evicted;
  stats.swaps = parts.scheduler->counters().swaps;
  stats.adapters_registered = static_cast<int64_t>(parts.adapters->num_registered());
  stats.adapters_loading = parts.adapters->num_uploading();
  stats.adapters_resident = parts.adapters->num_resident();
  stats.adapter_loads = parts.adapters->num_loads();
  stats.adapter_evictions = parts.adapters->num_evictions();
  stats.adapter_hits = parts.adapters->num_hits();
  const HostTierStats& host = parts.adapters->host();
  stats.adapter_host_bytes = host.bytes;
  stats.adapters_in_host_memory = host.images;
  stats.adapters_on_disk_only = host.images_on_disk;
  stats.adapter_host_loads = host.loads;
  stats.adapter_host_evictions = host.evictions;
  stats.adapter_read_ms = host.read_ms;
  stats.adapter_pack_ms = host.pack_ms;
  stats.adapter_upload_ms = parts.adapters->upload_ms();
  stats.pages_total = parts.pool->num_pages();
  stats.pages_free = parts.pool->num_free();
  stats.pages_kv = parts.pool->num_used(PageUse::kKv);
  stats.pages_adapter = parts.pool->num_used(PageUse::kAdapter);
  stats.page_bytes_wasted = parts.adapters->wasted_bytes() +
                            stats.pages_kv / parts.geometry.layout.num_groups * parts.geometry.wasted_block_bytes();
  stats.kv_bytes_unfilled = parts.scheduler->num_unfilled_positions() * parts.geometry.token_bytes();
  if (const PrefixCache* prefix = parts.prefix.get(); prefix != nullptr) {
    stats.prefix_queries = prefix->counters.queries;
    stats.prefix_query_tokens = prefix->counters.query_tokens;
    stats.prefix_hit_tokens = prefix->counters.hit_tokens;
    stats.prefix_evictions = prefix->num_evictions();
    stats.prefix_blocks = prefix->num_blocks();
    stats.pages_cached = prefix->num_idle_pages();
  }
  return stats;
}

Status Engine::health(std::string* message) const {
  const std::lock_guard<std::mutex> lock(parts_->mutex);
  if (message != nullptr) {
    *message = parts_->failure_message;
  }
  return parts_->failure;
}

Status Engine::drain(int32_t timeout_ms) {
  Parts& parts = *parts_;
  std::unique_lock<std::mutex> lock(parts.mutex);
  parts.draining = true;
  const auto idle = [&] {
    return parts.failure != Status::kOk ||
           (parts.inbox.empty() && parts.scheduler->running().empty() && parts.scheduler->waiting().empty());
  };
  bool done = true;
  if (timeout_ms < 0) {
    parts.progress.wait(lock, idle);
  } else {
    done = parts.progress.wait_for(lock, std::chrono::milliseconds(timeout_ms), idle);
  }
  parts.check_alive();
  return done ? Status::kOk : Status::kTimeout;
}

void Engine::trim(uint64_t target_bytes) {
  {
    const std::lock_guard<std::mutex> lock(parts_->mutex);
    parts_->check_alive();
    parts_->trim_pages = static_cast<int64_t>(target_bytes / static_cast<uint64_t>(parts_->info.page_bytes));
  }
  parts_->wake();
}

void Engine::notify() {
  parts_->wake();
}

void Engine::cancel(const std::shared_ptr<Submission>& submission, bool drop_turn) {
  submission->drop_turn.store(drop_turn);
  submission->cancelled.store(true);
  parts_->wake();
}

// Builds the sequence with everything it will ever need, so that no step allocates for it.
std::shared_ptr<Sequence> Engine::make_sequence(const std::shared_ptr<Submission>& submission) {
  const Parts& parts = *parts_;
  const Request& request = submission->request;
  check_sampling(request.sampling);
  check_tokens(request.opening, "prompt token", parts.config.vocab_size);
  check_tokens(request.prompt, "prompt token", parts.config.vocab_size);
  check_tokens(request.stop_tokens, "stop token", parts.config.vocab_size);
  const Session* session = request.session.get();
  const size_t history = session == nullptr ? 0 : session->tokens.size();
  const size_t opening = history == 0 ? request.opening.size() : 0;
  if (opening + request.prompt.size() == 0) {
    throw Error(Status::kInvalid, "the prompt is empty: at least one token is needed");
  }
  const size_t prompt = history + opening + request.prompt.size();
  const auto context = static_cast<size_t>(parts.info.max_context_tokens);
  if (prompt >= context) {
    throw Error(Status::kContextLength,
                "prompt of " + std::to_string(opening + request.prompt.size()) + " tokens" +
                    (session == nullptr ? "" : " after " + std::to_string(history) + " of the session") +
                    " leaves no room in the context of " + std::to_string(context));
  }
  auto sequence = std::make_shared<Sequence>();
  sequence->submission = submission;
  sequence->num_history = static_cast<int32_t>(history);
  sequence->num_prompt = static_cast<int32_t>(prompt);
  sequence->tokens_max = std::min(context, prompt + static_cast<size_t>(request.sampling.max_tokens));
  sequence->tokens.reserve(sequence->tokens_max);
  if (session != nullptr) {
    sequence->tokens = session->tokens;
  }
  sequence->tokens.reserve(sequence->tokens_max);
  sequence->tokens.insert(sequence->tokens.end(), request.opening.begin(),
                          request.opening.begin() + static_cast<ptrdiff_t>(opening));
  sequence->tokens.insert(sequence->tokens.end(), request.prompt.begin(), request.prompt.end());
  if (!request.stop_strings.empty()) {
    sequence->stops =
        std::make_unique<OutputText>(request.tokenizer, request.stop_strings, request.sampling.min_tokens);
  }
  if (request.sampling.min_tokens > 0) {
    sequence->suppressed = request.stop_tokens;
    sequence->suppressed.insert(sequence->suppressed.end(), parts.config.eos_token_ids.begin(),
                                parts.config.eos_token_ids.end());
  }
  const Adapter* adapter = request.adapter.get();
  sequence->row_scale = adapter == nullptr ? 0.0f : adapter->scale * request.scale;
  sequence->result.seed = request.sampling.seed != 0 ? request.sampling.seed : choose_seed();
  int64_t pages = parts.geometry.pages(static_cast<int64_t>(sequence->tokens_max));
  if (adapter != nullptr && sequence->row_scale != 0.0f) {
    pages += parts.adapters->pages_of(*adapter->image);
  }
  if (pages > parts.info.num_pages) {
    throw Error(Status::kDeviceNomem, "the request can never fit: it needs " + std::to_string(pages) +
                                          " pages and the pool has " + std::to_string(parts.info.num_pages) +
                                          " (raise device_memory_bytes or lower max_tokens)");
  }
  sequence->kv = session != nullptr
                     ? session->kv
                     : std::make_shared<KvSequence>(*parts.pool, parts.geometry,
                                                    static_cast<int64_t>(sequence->tokens_max), parts.prefix.get());
  return sequence;
}

// Under the lock.
void Engine::enqueue(std::shared_ptr<Sequence> sequence) {
  Parts& parts = *parts_;
  const Request& request = sequence->request();
  parts.check_alive();
  if (parts.draining) {
    throw Error(Status::kClosed, "the engine is draining: no new work");
  }
  if (parts.inbox.size() + parts.scheduler->waiting().size() >=
      static_cast<size_t>(parts.options.max_queued_requests)) {
    throw Error(Status::kOverloaded,
                "max_queued_requests = " + std::to_string(parts.options.max_queued_requests) + " requests are waiting");
  }
  Adapter* adapter = request.adapter.get();
  if (adapter != nullptr && adapter->unloaded.load()) {
    throw Error(Status::kNotFound, "adapter '" + adapter->name + "' was unloaded");
  }
  parts.note_queue(sequence->submission->stream->queue());
  parts.open_prefix(*sequence);
  if (adapter != nullptr) {
    ++adapter->in_flight;
    ++adapter->requests;
  }
  sequence->submission->submitted_ms = now_ms();
  if (request.deadline_ms > 0) {
    sequence->submission->deadline_at_ms =
        sequence->submission->submitted_ms + static_cast<double>(request.deadline_ms);
  }
  ++parts.counters.requests_submitted;
  parts.inbox.push_back(std::move(sequence));
}

void Engine::submit(const std::shared_ptr<Submission>& submission) {
  std::vector<Error> errors;
  submit_batch({submission}, &errors);
  if (errors[0].status() != Status::kOk) {
    throw errors[0];
  }
}

void Engine::submit_batch(const std::vector<std::shared_ptr<Submission>>& submissions, std::vector<Error>* errors) {
  errors->assign(submissions.size(), Error(Status::kOk, ""));
  std::vector<std::shared_ptr<Sequence>> sequences(submissions.size());
  for (size_t i = 0; i < submissions.size(); ++i) {
    Session* session = submissions[i]->request.session.get();
    try {
      if (session != nullptr && session->closed.load()) {
        throw Error(Status::kClosed, "the session is closed");
      }
      if (session != nullptr && session->busy.exchange(true)) {
        throw Error(Status::kBusy, "the session has a running request");
      }
      try {
        sequences[i] = make_sequence(submissions[i]);
      } catch (...) {
        if (session != nullptr) {
          session->busy.store(false);
        }
        throw;
      }
    } catch (const Error& error) {
      (*errors)[i] = error;
    }
  }
  {
    const std::lock_guard<std::mutex> lock(parts_->mutex);  // one lock: admitted together, in order
    for (size_t i = 0; i < submissions.size(); ++i) {
      if (sequences[i] == nullptr) {
        continue;
      }
      try {
        enqueue(sequences[i]);
      } catch (const Error& error) {
        (*errors)[i] = error;
        Session* session = submissions[i]->request.session.get();
        if (session != nullptr) {
          session->busy.store(false);
        }
      }
    }
    parts_->woken = true;
  }
  parts_->work.notify_all();
}

std::vector<StepRecord> Engine::step_records(size_t max) const {
  const Parts& parts = *parts_;
  const std::lock_guard<std::mutex> lock(parts.mutex);
  const uint64_t count = std::min<uint64_t>({max, parts.num_records, parts.records.size()});
  std::vector<StepRecord> records;
  for (uint64_t i = parts.num_records - count; i < parts.num_records; ++i) {
    records.push_back(parts.records[i % parts.records.size()]);
  }
  return records;
}

double Engine::measure_read_bandwidth() {
  Parts& parts = *parts_;
  std::unique_lock<std::mutex> lock(parts.mutex);
  const uint64_t wanted = ++parts.probes_wanted;
  parts.woken = true;
  parts.work.notify_all();
  parts.progress.wait(lock, [&] { return parts.probes_done >= wanted || parts.failure != Status::kOk; });
  parts.check_alive();
  return parts.probe_bandwidth;
}

double Engine::weight_bytes(double active_experts) const {
  return weight_bytes_of_step(parts_->config, *parts_->weights, active_experts);
}

}  // namespace moelora
