// SPDX-License-Identifier: Apache-2.0
// Fairness between adapters: shares of what is computed, counted from the batches, while all have requests waiting.
#include <algorithm>
#include <cmath>

#include "tests/engine/scheduler_harness.h"

namespace moelora::test {
namespace {

struct Client {
  std::shared_ptr<Adapter> adapter;
  int32_t prompt = 0, outputs = 0;
  size_t num_waiting = 0;  // kept
  double served = 0;       // prompt tokens, and output tokens twice
  size_t waits = 0;
};

struct Contest {
  Contest(bool is_fair, std::vector<Client> given, bool first_is_base = false) : harness(options_of(is_fair)) {
    clients = std::move(given);
    for (size_t i = 0; i < clients.size(); ++i) {
      clients[i].adapter = i == 0 && first_is_base ? nullptr : harness.add_adapter(2);
    }
  }
  static SchedulerHarness::Options options_of(bool is_fair) {
    SchedulerHarness::Options options;
    options.limits.num_sequences_max = options.limits.num_logit_rows_max = 4;
    options.limits.num_rows_max = 12;
    options.limits.num_waiting_max = 1024;
    options.limits.num_prefetched_max = 4;
    options.limits.output_buffer_tokens = 1 << 20;
    options.limits.is_fair_by_adapter = is_fair;
    options.num_pages = 400;
    options.num_slots = 8;
    return options;
  }
  Client& client_of(const Sequence& sequence) {
    return *std::find_if(clients.begin(), clients.end(),
                         [&](const Client& client) { return client.adapter == sequence.request().adapter; });
  }
  void run(int steps) {
    for (int step = 0; step < steps; ++step) {
      for (Client& client : clients) {
        client.waits = 0;
      }
      for (const auto& waiting : harness.scheduler.waiting()) {
        ++client_of(*waiting).waits;
      }
      for (Client& client : clients) {
        for (; client.waits < client.num_waiting; ++client.waits) {
          harness.submit(SchedulerHarness::request(client.adapter, client.prompt, client.outputs));
        }
      }
      harness.step();
      for (const BatchEntry& entry : harness.batch.entries) {
        Client& client = client_of(*entry.sequence);
        client.served += std::clamp(entry.sequence->num_prompt - entry.first, 0, entry.count) + (entry.samples ? 2 : 0);
      }
      const double apart = clients[0].served / weights[0] - clients[1].served / weights[1];
      farthest = std::max(farthest, std::abs(apart - apart_at_first));
    }
  }
  void weigh(double first, double second) {
    weights[0] = first;
    weights[1] = second;
    for (size_t i = 0; i < 2; ++i) {
      Adapter* adapter = clients[i].adapter.get();
      (adapter == nullptr ? harness.scheduler.base_share() : adapter->share).weight = weights[i];
    }
  }
  [[nodiscard]] double ratio() const { return clients[1].served / clients[0].served; }

  SchedulerHarness harness;
  std::vector<Client> clients;
  double weights[2] = {1, 1};
  double farthest = 0;
  double apart_at_first = 0;
};

// Many long requests against few short ones.
const std::vector<Client> kUnlike = {{nullptr, 10, 5, 40}, {nullptr, 3, 12, 6}};
// 2 max(longest prompt, twice what all rows hold).
constexpr double kApartMax = 2 * 2 * 4 * 15;

}  // namespace

TEST_CASE("adapters get what their weights say, whatever they ask for", "[scheduler]") {
  for (const bool first_is_base : {false, true}) {
    for (const double weight : {1.0, 3.0, 0.5}) {
      INFO("weight of the second " << weight << ", the first is the base: " << first_is_base);
      Contest contest(true, kUnlike, first_is_base);
      contest.weigh(1.0, weight);
      contest.run(4000);
      CHECK(std::abs(contest.ratio() - weight) <= 0.02 * weight);
      CHECK(contest.farthest <= kApartMax / std::min(1.0, weight));
      CHECK(contest.clients[0].served > 1000);
    }
  }
  // First come first served gives to those who ask most.
  Contest contest(false, kUnlike);
  contest.run(4000);
  CHECK(contest.ratio() < 0.3);
  CHECK(contest.farthest > kApartMax);
}

TEST_CASE("an adapter that was idle saves nothing up", "[scheduler]") {
  std::vector<Client> clients = {{nullptr, 6, 6, 8}, {nullptr, 6, 6, 0}};
  Contest contest(true, clients);
  contest.run(1000);
  CHECK(contest.clients[0].served > 1000);
  CHECK(contest.clients[1].served == 0);
  contest.clients[1].num_waiting = 8;
  contest.apart_at_first = contest.clients[0].served;
  contest.farthest = 0;
  const double before = contest.clients[0].served;
  contest.run(400);
  const double first = contest.clients[0].served - before;
  CHECK(std::abs(contest.clients[1].served - first) <= 0.1 * first);
  CHECK(contest.farthest <= kApartMax);
  // Nor does one that comes when nobody waits any more.
  contest.clients[0].num_waiting = contest.clients[1].num_waiting = 0;
  REQUIRE(contest.harness.run_to_end());
  const auto late = contest.harness.add_adapter(1);
  contest.harness.submit(SchedulerHarness::request(late, 6, 6));
  const double least = std::min(contest.clients[0].adapter->share.served, contest.clients[1].adapter->share.served);
  CHECK(late->share.served >= 0.9 * least);
}

TEST_CASE("a priority stands above fairness, and an adapter's own requests keep their order", "[scheduler]") {
  Contest contest(true, kUnlike);
  contest.run(50);
  Request request = SchedulerHarness::request(contest.clients[0].adapter, 6, 4);
  request.priority = 1;
  contest.clients[0].adapter->share.served += 1e6;
  const auto urgent = contest.harness.submit(request);
  contest.run(20);
  CHECK(urgent->first_token_ms > 0);
  contest.clients[0].adapter->share.served -= 1e6;
  // Arrivals of each adapter start in order.
  uint64_t last[2] = {0, 0};
  for (int i = 0; i < 300; ++i) {
    const auto before = contest.harness.scheduler.running();
    contest.run(1);
    for (const BatchEntry& entry : contest.harness.batch.entries) {
      const bool is_new =
          std::none_of(before.begin(), before.end(), [&](const auto& held) { return held.get() == entry.sequence; });
      if (is_new && entry.first == 0) {
        const size_t client = entry.sequence->request().adapter == contest.clients[0].adapter ? 0 : 1;
        CHECK(entry.sequence->arrival > last[client]);
        last[client] = entry.sequence->arrival;
      }
    }
  }
  CHECK((last[0] > 0 && last[1] > 0));
}

}  // namespace moelora::test
