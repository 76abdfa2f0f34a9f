// SPDX-License-Identifier: Apache-2.0
// Early refusal: who is told at once that its deadline cannot be met, and who is not.
#include "tests/engine/scheduler_harness.h"

namespace moelora::test {
namespace {

SchedulerHarness::Options options_of(bool refuses_early) {
  SchedulerHarness::Options options;
  options.limits.num_sequences_max = options.limits.num_logit_rows_max = 2;
  options.limits.num_rows_max = 16;
  options.limits.num_waiting_max = 64;
  options.limits.output_buffer_tokens = 1 << 20;
  options.limits.refuses_early = refuses_early;
  options.num_pages = 400;
  options.num_slots = 2;
  return options;
}

Request request_until(uint64_t deadline_ms, int32_t prompt, int32_t outputs) {
  Request request = SchedulerHarness::request(nullptr, prompt, outputs);
  request.deadline_ms = deadline_ms;
  return request;
}

}  // namespace

TEST_CASE("a request is refused early if its own work takes longer than is left", "[scheduler]") {
  // 100 rows at 10 a millisecond, 50 steps of 2 ms behind the first token: 110 ms.
  for (const uint64_t deadline : {0, 109, 110, 200}) {
    INFO("deadline " << deadline);
    SchedulerHarness harness(options_of(true));
    harness.scheduler.rates() = {10.0, 2.0, 0.0};
    harness.submit(request_until(deadline, 100, 51));
    CHECK(harness.end_late() == (deadline == 109 ? 1u : 0u));
  }
  SchedulerHarness off(options_of(false));
  off.scheduler.rates() = {10.0, 2.0, 0.0};
  off.submit(request_until(1, 100, 51));
  CHECK(off.end_late() == 0);
  SchedulerHarness unmeasured(options_of(true));
  unmeasured.submit(request_until(1, 100, 51));
  CHECK(unmeasured.end_late() == 0);
}

TEST_CASE("one that may stop earlier is given the time of its first tokens alone", "[scheduler]") {
  for (const int32_t min_tokens : {0, 6}) {
    for (const uint64_t deadline : {9, 10, 19, 20}) {
      INFO("min_tokens " << min_tokens << ", deadline " << deadline);
      SchedulerHarness harness(options_of(true));
      harness.scheduler.rates() = {10.0, 2.0, 0.0};
      Request request = request_until(deadline, 100, 51);
      request.sampling.ignore_eos = false;
      request.sampling.min_tokens = min_tokens;
      harness.submit(request);
      CHECK(harness.end_late() == (deadline < (min_tokens == 0 ? 10u : 20u) ? 1u : 0u));
    }
  }
}

TEST_CASE("prompts before it count, those of requests that are late themselves do not", "[scheduler]") {
  for (const uint64_t deadline : {19, 20}) {
    SchedulerHarness harness(options_of(true));
    harness.scheduler.rates() = {10.0, 0.0, 0.0};
    harness.submit(request_until(5, 100, 1));  // late
    harness.submit(request_until(0, 100, 1));
    harness.submit(request_until(deadline, 100, 1));
    const auto first = harness.submit([] {
      Request urgent = request_until(11, 100, 1);
      urgent.priority = 1;
      return urgent;
    }());
    CHECK(!first->is_late);
    // The urgent one goes before both others: 30 ms.
    CHECK(harness.end_late() == 2);
    CHECK(!first->is_late);
  }
  for (const uint64_t deadline : {19, 20}) {
    SchedulerHarness harness(options_of(true));
    harness.scheduler.rates() = {10.0, 0.0, 0.0};
    harness.submit(request_until(5, 100, 1));  // late
    harness.submit(request_until(0, 100, 1));
    harness.submit(request_until(deadline, 100, 1));
    CHECK(harness.end_late() == (deadline == 19 ? 2u : 1u));
  }
}

}  // namespace moelora::test
