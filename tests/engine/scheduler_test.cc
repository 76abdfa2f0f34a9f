// SPDX-License-Identifier: Apache-2.0
// Who waits how long: the bounds of scheduler_limits.h under a hot adapter that never pauses, loads begun in a step,
// and pools so tight that a circle of those who wait for each other would show.
#include <algorithm>
#include <random>

#include "tests/engine/scheduler_harness.h"

namespace moelora::test {
namespace {

constexpr int32_t kRows = 4, kPrompt = 6, kOutputs = 8, kWait = 24;

SchedulerHarness::Options options_of_skew(int32_t num_slots, int32_t wait) {
  SchedulerHarness::Options options;
  options.limits.num_sequences_max = kRows;
  options.limits.num_rows_max = 8;
  options.limits.num_logit_rows_max = kRows;
  options.limits.num_waiting_max = 1024;
  options.limits.num_prefetched_max = 4;
  options.limits.output_buffer_tokens = 1 << 20;
  options.limits.num_overtaking_steps_max = wait;
  options.num_slots = num_slots;
  options.num_pages = 200;
  return options;
}

// scheduler_limits.h, of these requests.
int bound_of(size_t num_before) {
  const int32_t chunks = (kPrompt + 8 - kRows) / (8 - kRows + 1);
  return kWait + static_cast<int>(num_before + 3) * (kRows * chunks + kOutputs) + chunks;
}

// Nine of ten requests are for one adapter, of which some always wait.
struct Skew {
  explicit Skew(const SchedulerHarness::Options& options) : harness(options) {
    for (auto& adapter : adapters) {
      adapter = harness.add_adapter(3);
    }
  }
  struct Rare {
    std::shared_ptr<Sequence> sequence;
    size_t num_before = 0;
    int64_t submitted_at = 0;  // steps
    int64_t first_at = -1;
    int64_t loading = 0;    // steps in which only its adapter was lacking
    int64_t overtaken = 0;  // and those in which others started before it
  };

  void run(int steps) {
    const auto hot_waits = [&] {
      return std::count_if(harness.scheduler.waiting().begin(), harness.scheduler.waiting().end(),
                           [&](const auto& held) { return held->request().adapter == adapters[0]; });
    };
    size_t submitted = 0;
    for (int i = 0; i < steps; ++i) {
      while (hot_waits() < 2 * kRows) {
        harness.submit(SchedulerHarness::request(adapters[0], kPrompt, kOutputs));
        if (++submitted % 9 == 0) {
          const auto& adapter = adapters[1 + submitted / 9 % (adapters.size() - 1)];
          const size_t before = harness.scheduler.waiting().size();
          rare.push_back(
              {harness.submit(SchedulerHarness::request(adapter, kPrompt, kOutputs)), before, harness.num_steps});
        }
      }
      const auto last = harness.scheduler.running();
      if (harness.step() == 0) {
        continue;
      }
      for (Rare& one : rare) {
        const Sequence& sequence = *one.sequence;
        if (sequence.first_token_ms > 0 && one.first_at < 0) {
          one.first_at = harness.num_steps;
        }
        if (sequence.state != SequenceState::kWaiting) {
          continue;
        }
        const auto& running = harness.scheduler.running();
        one.loading += sequence.adapter_wanted_ms > 0 && sequence.blocked_at < 0 ? 1 : 0;
        one.overtaken += std::any_of(running.begin(), running.end(), [&](const auto& held) {
          return held->arrival > sequence.arrival && std::find(last.begin(), last.end(), held) == last.end();
        });
      }
    }
  }

  SchedulerHarness harness;
  std::array<std::shared_ptr<Adapter>, 8> adapters;  // the first is hot
  std::vector<Rare> rare;
};

}  // namespace

TEST_CASE("a rare adapter's first token comes within the stated number of steps", "[scheduler]") {
  for (const int32_t num_slots : {1, 2, 3}) {
    for (const int32_t upload_steps : {0, 5}) {
      INFO("slots " << num_slots << ", steps of an upload " << upload_steps);
      SchedulerHarness::Options options = options_of_skew(num_slots, kWait);
      options.upload_steps = upload_steps;
      Skew skew(options);
      skew.run(6000);
      REQUIRE(skew.rare.size() > 50);
      size_t served = 0;
      int64_t latest = 0;
      for (const Skew::Rare& rare : skew.rare) {
        const int64_t end = rare.first_at > 0 ? rare.first_at : skew.harness.num_steps;
        const int64_t steps = end - rare.submitted_at - rare.loading;
        INFO("before it " << rare.num_before << ", steps " << steps << ", of its adapter's way " << rare.loading);
        CHECK(steps <= bound_of(rare.num_before));
        // Nobody starts before it longer than stated, its adapter's way aside.
        CHECK(rare.overtaken <= kWait + rare.loading);
        served += rare.first_at > 0 ? 1 : 0;
        latest = std::max(latest, steps);
      }
      CHECK(served > skew.rare.size() * 3 / 4);
      // The hot one does go before where it has the only slot. As nothing else is short, queues before
      // it cost less than the bound allows for them.
      CHECK((num_slots > 1 || latest > kWait));
      CHECK(latest <= bound_of(0));
    }
  }
}

TEST_CASE("without a bound a rare adapter would wait for ever", "[scheduler]") {
  Skew skew(options_of_skew(1, 1 << 30));
  skew.run(6000);
  const Skew::Rare& first = skew.rare.front();
  CHECK(first.first_at < 0);
  CHECK(skew.harness.num_steps - first.submitted_at > bound_of(first.num_before));
}

TEST_CASE("a request whose pages are short is overtaken no longer than stated", "[scheduler]") {
  for (const int32_t wait : {0, 10}) {
    SchedulerHarness::Options options = options_of_skew(2, wait);
    options.num_pages = 16;
    SchedulerHarness harness(options);
    // Base requests of four pages hold the pool; one of fourteen can run only when nearly all of them have gone.
    std::shared_ptr<Sequence> large;
    int overtaken = 0;
    for (int i = 0; i < 400; ++i) {
      while (harness.scheduler.waiting().size() < 6) {
        harness.submit(SchedulerHarness::request(nullptr, 5, 6 + static_cast<int32_t>(harness.batch.entries.size())));
      }
      if (i == 20) {
        large = harness.submit(SchedulerHarness::request(nullptr, 48, 4));
      }
      const auto last = harness.scheduler.running();
      harness.step();
      if (large == nullptr || large->state != SequenceState::kWaiting) {
        continue;
      }
      const auto& running = harness.scheduler.running();
      overtaken += std::any_of(running.begin(), running.end(), [&](const auto& held) {
        return held->arrival > large->arrival && std::find(last.begin(), last.end(), held) == last.end();
      });
    }
    INFO("steps allowed " << wait << ", overtaken in " << overtaken);
    CHECK(large->first_token_ms > 0);
    CHECK(overtaken <= wait);
    CHECK((wait == 0 || overtaken > 0));
  }
}

TEST_CASE("a step begins no more loads than it may", "[scheduler]") {
  for (const int32_t loads : {1, 2, 3}) {
    SchedulerHarness::Options options = options_of_skew(8, kWait);
    options.limits.num_sequences_max = options.limits.num_rows_max = options.limits.num_logit_rows_max = 8;
    options.limits.num_loads_max = loads;
    options.limits.num_prefetched_max = 8;
    SchedulerHarness harness(options);
    std::vector<std::shared_ptr<Adapter>> adapters;
    for (int i = 0; i < 6; ++i) {
      adapters.push_back(harness.add_adapter(2));
      harness.submit(SchedulerHarness::request(adapters.back(), 3, 2));
      harness.submit(SchedulerHarness::request(adapters.back(), 3, 2));  // no load of its own
    }
    uint64_t before = 0;
    uint64_t most = 0;
    while (!harness.is_idle()) {
      harness.step();
      most = std::max(most, harness.adapters.num_loads() - before);
      before = harness.adapters.num_loads();
    }
    CHECK(most == static_cast<uint64_t>(loads));
    CHECK(before == 6);
  }
}

TEST_CASE("in tight pools all that was admitted ends", "[scheduler]") {
  std::vector<uint32_t> seeds = {2038};  // kept KV of one whom the counters put last
  for (uint32_t seed = 1; seed <= 40; ++seed) {
    seeds.push_back(seed);
  }
  for (const uint32_t seed : seeds) {
    INFO("seed " << seed);
    std::mt19937 random(seed);
    const auto draw = [&](int32_t low, int32_t high) {
      return low + static_cast<int32_t>(random() % static_cast<uint32_t>(high - low + 1));
    };
    SchedulerHarness::Options options = options_of_skew(draw(1, 4), draw(0, 8));
    options.num_pages = draw(12, 30);
    options.num_swap_pages = draw(0, 20);
    options.limits.is_fair_by_adapter = draw(0, 1) == 1;
    options.upload_steps = draw(0, 4);
    options.limits.num_prefetched_max = draw(0, 8);
    options.limits.num_loads_max = draw(1, 4);
    options.limits.num_sequences_max = options.limits.num_logit_rows_max = draw(1, 6);
    options.limits.num_rows_max = options.limits.num_sequences_max + draw(0, 10);
    SchedulerHarness harness(options);
    std::vector<std::shared_ptr<Adapter>> adapters = {nullptr};
    for (int i = 0; i < 6; ++i) {
      adapters.push_back(harness.add_adapter(draw(1, options.num_pages / 2)));
    }
    std::vector<std::shared_ptr<Session>> sessions;
    for (int i = 0; i < 4; ++i) {
      sessions.push_back(harness.add_session(options.num_pages * SchedulerHarness::kBlockTokens));
      sessions.back()->adapter = adapters[random() % adapters.size()];
    }
    int left = 150;
    for (int step = 0; step < 20000 && (left > 0 || !harness.is_idle()); ++step) {
      for (int i = draw(0, 3); i > 0 && left > 0; --i) {
        Request request = SchedulerHarness::request(adapters[random() % adapters.size()], draw(1, 30), draw(1, 30));
        request.priority = draw(0, 2);
        if (draw(0, 3) == 0) {
          request.session = sessions[random() % sessions.size()];
          request.adapter = request.session->adapter;
        }
        const auto history = request.session == nullptr ? 0 : static_cast<int32_t>(request.session->tokens.size());
        int32_t pages =
            harness.geometry.pages(history + static_cast<int32_t>(request.prompt.size()) + request.sampling.max_tokens);
        pages += request.adapter == nullptr ? 0 : harness.adapters.pages_of(*request.adapter->image);
        if (pages <= options.num_pages && (request.session == nullptr || !request.session->busy)) {  // as submit does
          harness.submit(request);
          --left;
        } else if (history > 40) {
          if (!request.session->busy) {
            request.session->tokens.clear();
            request.session->kv->truncate(harness.geometry, 0);
          }
        }
      }
      harness.step();
    }
    CHECK(left == 0);
    CHECK(harness.is_idle());
  }
}

TEST_CASE("requests of two sessions that keep each other's pages both end", "[scheduler]") {
  SchedulerHarness::Options options = options_of_skew(1, kWait);
  options.num_pages = 10;
  SchedulerHarness harness(options);
  std::vector<std::shared_ptr<Session>> sessions;
  for (int turn = 0; turn < 2; ++turn) {
    for (size_t i = 0; i < 2; ++i) {
      if (turn == 0) {
        sessions.push_back(harness.add_session(40));
      }
      Request request = SchedulerHarness::request(nullptr, turn == 0 ? 16 : 12, 3);
      request.session = sessions[i];
      harness.submit(request);  // at first 5 pages each, then 9 of 10
    }
    CHECK(harness.run_to_end(1000));
  }
}

}  // namespace moelora::test
