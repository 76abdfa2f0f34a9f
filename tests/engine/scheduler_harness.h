// SPDX-License-Identifier: Apache-2.0
// A scheduler without an engine: requests, and steps that give every sampled sequence a token. Adapters are bytes of a
// size, and really copied, by the loader's own thread; `upload_steps` says how many steps later they count as there.
// Each computed token leaves a mark in its page, which must be there for as long as the sequence builds on it.
#pragma once

#include <memory>
#include <thread>
#include <vector>

#include "runtime/engine/scheduler.h"
#include "tests/support/catch.h"

namespace moelora::test {

class SchedulerHarness {
 public:
  struct Options {
    SchedulerLimits limits;
    int32_t num_pages = 0;
    int32_t num_slots = 0;
    int32_t upload_steps = 0;
    int32_t num_swap_pages = 0;
  };
  static constexpr int64_t kPageBytes = 2048;
  static constexpr int32_t kBlockTokens = 4;  // a page

  explicit SchedulerHarness(const Options& given)
      : options(given),
        geometry(geometry_of_test()),
        pool(given.num_pages, kPageBytes, *device),
        adapters({given.num_slots, 1, 0, 0}, pool, kernels_reference(), *device, {}),
        swap_space(given.num_swap_pages * kPageBytes, kPageBytes, *device),
        scheduler(given.limits, geometry, pool, adapters, &swap_space) {}
  ~SchedulerHarness() {
    adapters.stop_loading();
    scheduler.drop_all_pages();
  }

  std::shared_ptr<Adapter> add_adapter(int32_t num_pages) {
    auto image = std::make_shared<AdapterImage>();
    image->stream.resize(static_cast<size_t>(num_pages * kPageBytes));
    auto adapter = std::make_shared<Adapter>();
    adapter->name = "adapter " + std::to_string(++num_adapters);
    adapter->image = std::make_shared<TieredImage>(std::move(image));
    adapters.add(adapter);
    return adapter;
  }

  std::shared_ptr<Session> add_session(int32_t tokens_max) {
    auto session = std::make_shared<Session>();
    session->kv = std::make_shared<KvSequence>(pool, geometry, tokens_max);
    scheduler.add_session(session);
    return session;
  }

  static Request request(std::shared_ptr<Adapter> adapter, int32_t prompt, int32_t outputs) {
    Request made;
    made.adapter = std::move(adapter);
    made.prompt.assign(static_cast<size_t>(prompt), 1);
    made.sampling.max_tokens = outputs;
    made.sampling.ignore_eos = true;
    return made;
  }

  // As Engine::make_sequence and enqueue.
  std::shared_ptr<Sequence> submit(const Request& request) {
    auto submission = std::make_shared<Submission>();
    submission->request = request;
    submission->stream = std::make_unique<TokenStream>(request, 8, nullptr, 1, 0);
    submission->submitted_ms = now;
    submission->deadline_at_ms = request.deadline_ms > 0 ? now + static_cast<double>(request.deadline_ms) : 0;
    auto sequence = std::make_shared<Sequence>();
    Session* session = request.session.get();
    if (session != nullptr) {
      session->busy = true;
      sequence->tokens = session->tokens;
    }
    sequence->num_history = sequence->num_tokens();
    sequence->tokens.insert(sequence->tokens.end(), request.prompt.begin(), request.prompt.end());
    sequence->num_prompt = sequence->num_tokens();
    sequence->tokens_max = sequence->tokens.size() + static_cast<size_t>(request.sampling.max_tokens);
    sequence->kv = session != nullptr
                       ? session->kv
                       : std::make_shared<KvSequence>(pool, geometry, static_cast<int64_t>(sequence->tokens_max));
    sequence->row_scale = request.adapter == nullptr ? 0.0f : 1.0f;
    sequence->submission = std::move(submission);
    sequence->arrival = ++arrivals;
    scheduler.add(sequence);
    return sequence;
  }

  // A step of one millisecond. Returns the number of entries of its batch.
  size_t step() {
    now += 1;
    poll();
    scheduler.schedule(batch, now);
    in_batch = scheduler.running();
    audit();
    swap_pages();
    std::vector<Sequence*> ended;
    for (const BatchEntry& entry : batch.entries) {
      Sequence& sequence = *entry.sequence;
      compute(entry);
      sequence.kv->length = entry.first + entry.count;
      if (!entry.samples) {
        continue;
      }
      if (sequence.first_token_ms == 0) {
        sequence.first_token_ms = now;
      }
      sequence.tokens.push_back(2);
      if (sequence.tokens.size() == sequence.tokens_max) {
        ended.push_back(&sequence);
      }
    }
    for (Sequence* sequence : ended) {
      end(*sequence);
    }
    audit();
    num_steps += batch.entries.empty() ? 0 : 1;
    return batch.entries.size();
  }

  void end(Sequence& sequence) {
    const std::shared_ptr<Session> session = sequence.request().session;
    if (session != nullptr) {
      session->tokens = sequence.tokens;
    }
    scheduler.finish(sequence);
    if (session != nullptr) {
      session->busy = false;
    }
  }

  // Ends those that cannot be in time; their number.
  size_t end_late() {
    scheduler.mark_late(now);
    const auto waiting = scheduler.waiting();
    size_t count = 0;
    for (const auto& sequence : waiting) {
      if (sequence->is_late) {
        end(*sequence);
        ++count;
      }
    }
    return count;
  }

  [[nodiscard]] bool is_idle() const { return scheduler.running().empty() && scheduler.waiting().empty(); }
  // False if requests are left that do not get on.
  bool run_to_end(int steps_max = 100000) {
    for (int i = 0; i < steps_max && !is_idle(); ++i) {
      step();
    }
    return is_idle();
  }

  void audit() const {
    pool.audit();
    adapters.audit();
    scheduler.audit();
  }

  Options options;
  std::unique_ptr<Device> device = open_device_cpu();
  KvGeometry geometry;
  PagePool pool;
  AdapterCache adapters;
  SwapSpace swap_space;
  Scheduler scheduler;
  Batch batch;
  std::vector<std::shared_ptr<Sequence>> in_batch;  // for who looks at the batch after a step that ended some
  double now = 0;
  int64_t num_rows_computed = 0;
  int64_t num_steps = 0;  // with rows in them

 private:
  [[nodiscard]] uint64_t& mark(const Sequence& sequence, int32_t position) const {
    const PageId page = sequence.kv->pages.data()[position / kBlockTokens];
    return reinterpret_cast<uint64_t*>(pool.base() + page * kPageBytes)[position % kBlockTokens];
  }
  void compute(const BatchEntry& entry) {
    const Sequence& sequence = *entry.sequence;
    const uint64_t owner = reinterpret_cast<uintptr_t>(sequence.kv.get()) << 16;
    for (int32_t position = 0; position < entry.first; ++position) {
      REQUIRE(mark(sequence, position) == owner + static_cast<uint64_t>(position));
    }
    for (int32_t position = entry.first; position < entry.first + entry.count; ++position) {
      mark(sequence, position) = owner + static_cast<uint64_t>(position);
    }
    num_rows_computed += entry.count;
  }
  void swap_pages() {
    Stream stream(1, 0);
    for (size_t i = 0; i < batch.swaps_out.pages.size(); ++i) {
      read_pages_cpu(
          {pool.base(), kPageBytes, swap_space.place(batch.swaps_out.places[i]), kPageBytes, &batch.swaps_out.pages[i]},
          stream);
    }
    for (size_t i = 0; i < batch.swaps_in.pages.size(); ++i) {
      write_pages_cpu(
          {pool.base(), kPageBytes, swap_space.place(batch.swaps_in.places[i]), kPageBytes, &batch.swaps_in.pages[i]},
          stream);
    }
  }
  static KvGeometry geometry_of_test() {
    KvGeometry made;
    made.layout.block_tokens = kBlockTokens;
    made.layout.num_groups = 1;
    made.page_bytes = kPageBytes;
    return made;
  }
  // What has been copied counts `upload_steps` after the last time that something did.
  void poll() {
    if (!adapters.is_loading()) {
      polled_at = now;
      return;
    }
    if (now - polled_at < options.upload_steps) {
      return;
    }
    std::vector<FailedLoad> failed;
    while (adapters.is_loading()) {
      adapters.poll(failed);
      std::this_thread::yield();
    }
    REQUIRE(failed.empty());
    polled_at = now;
  }

  int num_adapters = 0;
  uint64_t arrivals = 0;
  double polled_at = 0;
};

}  // namespace moelora::test
