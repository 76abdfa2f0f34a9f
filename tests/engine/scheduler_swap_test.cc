// SPDX-License-Identifier: Apache-2.0
// Preemption by swap: contents come back as they were (the harness's marks), nothing is computed twice, and copying is
// chosen where it is cheaper.
#include "runtime/memory/swap_space.h"
#include "tests/engine/scheduler_harness.h"

namespace moelora::test {
namespace {

SchedulerHarness::Options options_of(int32_t num_pages, int32_t num_swap_pages) {
  SchedulerHarness::Options options;
  options.limits.num_sequences_max = options.limits.num_logit_rows_max = 4;
  options.limits.num_rows_max = 16;
  options.limits.num_waiting_max = 64;
  options.limits.num_prefetched_max = 4;
  options.limits.output_buffer_tokens = 1 << 20;
  options.num_pages = num_pages;
  options.num_swap_pages = num_swap_pages;
  options.num_slots = 3;
  return options;
}

// Requests that outgrow the pool while they run; the rows that they need if none is computed twice.
int64_t submit_some(SchedulerHarness& harness) {
  int64_t rows = 0;
  const std::vector<std::shared_ptr<Adapter>> adapters = {nullptr, harness.add_adapter(2), harness.add_adapter(3)};
  for (int32_t i = 0; i < 12; ++i) {
    harness.submit(SchedulerHarness::request(adapters[static_cast<size_t>(i) % 3], 5 + i, 30 - i));
    rows += 5 + i + 30 - i - 1;
  }
  return rows;
}

}  // namespace

TEST_CASE("swap space: chains of places, all or nothing, and back", "[scheduler]") {
  const auto device = open_device_cpu();
  SwapSpace space(10 * 64 + 63, 64, *device);
  CHECK(space.num_places() == 10);
  Swap a, b, c;
  REQUIRE(space.try_take(4, 40, &a));
  REQUIRE(space.try_take(6, 60, &b));
  CHECK(!space.try_take(1, 1, &c));
  CHECK(a.num_tokens == 40);
  std::vector<bool> seen(10);
  for (const Swap* swap : {&a, &b}) {
    int32_t count = 0;
    for (int32_t place = swap->first; place >= 0; place = space.next(place), ++count) {
      CHECK(!seen[static_cast<size_t>(place)]);
      seen[static_cast<size_t>(place)] = true;
    }
    CHECK(count == swap->num_pages);
  }
  space.release(a);
  space.release(a);  // nothing
  CHECK(space.num_free() == 4);
  CHECK(!space.try_take(5, 1, &c));
  CHECK(!space.try_take(0, 0, &c));
  REQUIRE(space.try_take(3, 1, &c));
  space.release(b);
  space.release(c);
  CHECK(space.num_free() == 10);
  space.audit();
  const SwapSpace none(63, 64, *device);
  CHECK(none.num_places() == 0);
}

TEST_CASE("what was swapped comes back and is not computed again", "[scheduler]") {
  SchedulerHarness harness(options_of(24, 64));
  const int64_t rows = submit_some(harness);
  REQUIRE(harness.run_to_end());
  CHECK(harness.scheduler.counters().preemptions > 3);
  CHECK(harness.scheduler.counters().swaps == harness.scheduler.counters().preemptions);
  CHECK(harness.num_rows_computed == rows);
  CHECK(harness.swap_space.num_free() == 64);

  SchedulerHarness recomputes(options_of(24, 0));
  submit_some(recomputes);
  REQUIRE(recomputes.run_to_end());
  CHECK(recomputes.scheduler.counters().swaps == 0);
  CHECK(recomputes.num_rows_computed > rows);
}

TEST_CASE("where the swap space is full, or copying costs more, KV is computed again", "[scheduler]") {
  SchedulerHarness full(options_of(24, 6));
  const int64_t rows = submit_some(full);
  REQUIRE(full.run_to_end());
  CHECK(full.scheduler.counters().swaps > 0);
  CHECK(full.scheduler.counters().swaps < full.scheduler.counters().preemptions);
  CHECK(full.num_rows_computed > rows);
  // A page of four tokens there and back is 4096 bytes: at 1024 bytes a millisecond 4 ms, as four rows at one a
  // millisecond. With 32 tokens or more the last page costs less than a ninth.
  for (const double rate : {1000.0, 1150.0}) {
    SchedulerHarness harness(options_of(24, 64));
    harness.scheduler.rates() = {1.0, 1.0, rate};
    harness.submit(SchedulerHarness::request(nullptr, 47, 49));  // 24 pages in all
    harness.submit(SchedulerHarness::request(nullptr, 32, 20));
    REQUIRE(harness.run_to_end());
    INFO("bytes a millisecond " << rate << ", swaps " << harness.scheduler.counters().swaps);
    CHECK(harness.scheduler.counters().preemptions > 0);
    CHECK((harness.scheduler.counters().swaps > 0) == (rate > 1024));
  }
}

TEST_CASE("one that is cancelled while it is swapped gives its places back", "[scheduler]") {
  SchedulerHarness harness(options_of(24, 64));
  submit_some(harness);
  size_t ended = 0;
  for (int i = 0; i < 2000 && !harness.is_idle(); ++i) {
    harness.step();
    for (const auto& waiting : std::vector<std::shared_ptr<Sequence>>(harness.scheduler.waiting())) {
      if (waiting->swap.num_pages > 0 && ++ended % 2 == 1) {
        harness.end(*waiting);
        harness.audit();
      }
    }
  }
  CHECK(harness.is_idle());
  CHECK(ended > 1);
  CHECK(harness.swap_space.num_free() == 64);
  CHECK(harness.pool.num_used(PageUse::kKv) == 0);
}

TEST_CASE("a step that copies pages to the host begins no upload", "[scheduler]") {
  SchedulerHarness::Options options = options_of(24, 64);
  options.limits.output_buffer_tokens = 4;
  SchedulerHarness harness(options);
  const auto unread = harness.submit(SchedulerHarness::request(nullptr, 56, 20));  // pauses with 15 of 24 pages
  for (int i = 0; i < 20; ++i) {
    harness.step();
  }
  REQUIRE(unread->num_outputs() == 4);
  const auto other = harness.submit(SchedulerHarness::request(harness.add_adapter(8), 20, 3));
  bool swapped = false;
  for (int i = 0; i < 20 && other->state != SequenceState::kFinished; ++i) {
    const uint64_t loads = harness.adapters.num_loads();
    harness.step();
    if (!harness.batch.swaps_out.pages.empty()) {
      swapped = true;
      CHECK(harness.adapters.num_loads() == loads);
    }
  }
  CHECK(swapped);
  CHECK(other->state == SequenceState::kFinished);
  CHECK(unread->swap.num_tokens == 59);
  // Once it is read it comes back, its marks with it.
  int32_t tokens[16];
  size_t count = 0;
  while (!harness.is_idle()) {
    unread->submission->stream->emit(2, nullptr, 0);
    REQUIRE(unread->submission->stream->read(0, tokens, 16, &count) == Status::kOk);
    harness.step();
  }
  CHECK(harness.num_rows_computed == 56 + 19 + 20 + 2);
}

}  // namespace moelora::test
