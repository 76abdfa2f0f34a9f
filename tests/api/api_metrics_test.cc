// SPDX-License-Identifier: Apache-2.0
// moelora_metrics_text against a strict reader of the format, its values against moelora_stats_get and
// moelora_adapter_stats_get, and the bound on the series of adapters.
#include <algorithm>

#include "tests/api/host.h"
#include "tests/api/prometheus.h"

using namespace moelora_host;

namespace {

const std::vector<int32_t> kPrompt = {52, 20, 29, 93, 163, 281, 246};

PrometheusReader read_metrics(const Host& host) {
  size_t n = 0;
  moelora_status status = MOELORA_MORE;
  std::string text;
  while (status == MOELORA_MORE) {
    text.resize(n);
    status = moelora_metrics_text(host.engine, text.data(), text.size(), &n, nullptr);
  }
  REQUIRE(status == MOELORA_OK);
  text.resize(n);
  return PrometheusReader(text);
}

moelora_adapter load_as(const Host& host, const std::string& name, const std::string& folder) {
  const std::string dir = adapter_dir(folder);
  moelora_adapter adapter = 0;
  Err err;
  INFO(err.message());
  REQUIRE(moelora_adapter_load_dir(host.engine, name.data(), name.size(), dir.data(), dir.size(), 0, &adapter, err) ==
          MOELORA_OK);
  return adapter;
}

moelora_adapter_stats stats_of(const Host& host, moelora_adapter adapter) {
  moelora_adapter_stats stats;
  moelora_adapter_stats_init(&stats);
  REQUIRE(moelora_adapter_stats_get(host.engine, adapter, &stats, nullptr) == MOELORA_OK);
  return stats;
}

}  // namespace

TEST_CASE("the metrics' text keeps to the format and says what the stats say") {
  const Host host;
  const std::string odd_name = "quo\"te\\back\nline{},=";
  const moelora_adapter odd = load_as(host, odd_name, "experts");
  const moelora_adapter idle = load_as(host, "idle", "attn");
  CHECK(host.answer(kPrompt, 6, odd).size() == 6);
  CHECK(host.answer(kPrompt, 3, odd).size() == 3);
  CHECK(host.answer(kPrompt, 4).size() == 4);
  REQUIRE(moelora_engine_drain(host.engine, 10000, nullptr) == MOELORA_OK);
  moelora_stats stats;
  moelora_stats_init(&stats);
  REQUIRE(moelora_stats_get(host.engine, &stats, nullptr) == MOELORA_OK);
  const PrometheusReader metrics = read_metrics(host);

  CHECK(metrics.value("moelora_output_tokens_total") == 13);
  CHECK(metrics.value("moelora_prompt_tokens_total") == 21);
  CHECK(metrics.value("moelora_requests_submitted_total") == 3);
  CHECK(metrics.value("moelora_requests_finished_total") == 3);
  CHECK(metrics.value("moelora_requests_failed_total") == 0);
  CHECK(metrics.value("moelora_steps_total") == static_cast<double>(stats.steps));
  CHECK(metrics.value("moelora_adapter_loads_total") == 1);
  CHECK(metrics.value("moelora_adapter_hits_total") == 1);  // the second request with it
  CHECK(metrics.value("moelora_adapters_registered") == 2);
  CHECK(metrics.value("moelora_adapters_loading") == 0);
  CHECK(metrics.value("moelora_requests_running") == 0);
  CHECK(metrics.value("moelora_requests_waiting") == 0);
  CHECK(metrics.value("moelora_pages") == metrics.value("moelora_pages_free") + metrics.value("moelora_pages_kv") +
                                              metrics.value("moelora_pages_adapter"));
  CHECK(stats.adapters_loading == 0);
  moelora_adapter_info info;
  moelora_adapter_info_init(&info);
  REQUIRE(moelora_adapter_info_get(host.engine, odd, &info, nullptr) == MOELORA_OK);
  CHECK(stats.adapter_load_bytes == info.host_bytes);
  CHECK(metrics.value("moelora_adapter_load_bytes_total") == static_cast<double>(info.host_bytes));

  const auto count_of = [&](const char* name) { return metrics.family(name).histogram.at("_count")[0].second; };
  const auto sum_of = [&](const char* name) { return metrics.family(name).histogram.at("_sum")[0].second; };
  CHECK(count_of("moelora_step_seconds") == static_cast<double>(stats.steps));
  CHECK(std::fabs(sum_of("moelora_step_seconds") - stats.steps_ms / 1e3) < 1e-9);
  CHECK(count_of("moelora_queue_seconds") == 3);
  CHECK(count_of("moelora_time_to_first_token_seconds") == 3);
  CHECK(count_of("moelora_request_seconds") == 3);
  CHECK(sum_of("moelora_queue_seconds") <= sum_of("moelora_time_to_first_token_seconds"));
  CHECK(sum_of("moelora_time_to_first_token_seconds") <= sum_of("moelora_request_seconds"));

  const auto of_odd = [&](const char* name) { return metrics.value(name, "adapter", odd_name); };
  CHECK(metrics.value("moelora_adapter_requests_total", "id", std::to_string(odd)) == 2);
  CHECK(of_odd("moelora_adapter_output_tokens_total") == 9);
  CHECK(of_odd("moelora_adapter_prompt_tokens_total") == 14);
  CHECK(of_odd("moelora_adapter_device_loads_total") == 1);
  CHECK(of_odd("moelora_adapter_device_hits_total") == 1);
  CHECK(of_odd("moelora_adapter_resident") == 1);
  CHECK(metrics.value("moelora_adapter_resident", "adapter", "idle") == 0);
  CHECK(metrics.value("moelora_adapter_requests_total", "adapter", "idle") == 0);
  const moelora_adapter_stats own = stats_of(host, odd);
  CHECK(own.prompt_tokens == 14);
  CHECK(own.resident == 1);
  CHECK((own.running == 0 && own.waiting == 0));
  CHECK(stats_of(host, idle).resident == 0);
}

TEST_CASE("running and waiting requests of an adapter") {
  Options options;
  options.max_num_sequences = 2;
  options.output_buffer_tokens = 4;  // who is not read pauses, so the state stays
  const Host host(options);
  const moelora_adapter first = load_as(host, "first", "attn");
  const moelora_adapter second = load_as(host, "second", "experts");
  std::vector<moelora_request> requests;
  for (int i = 0; i < 2; ++i) {
    requests.push_back(host.submit(kPrompt, 40, first));
  }
  // Both have written what they may before others come, who would take the rows of the paused ones.
  for (const moelora_request request : requests) {
    int32_t token = 0;
    REQUIRE(moelora_request_read(host.engine, request, 10000, &token, 1, nullptr, 0, nullptr, nullptr) == MOELORA_OK);
  }
  CHECK(stats_of(host, first).running + stats_of(host, first).waiting == 2);
  CHECK(stats_of(host, second).running + stats_of(host, second).waiting == 0);
  for (int i = 0; i < 3; ++i) {
    requests.push_back(host.submit(kPrompt, 40, second));
  }
  const PrometheusReader metrics = read_metrics(host);
  double running = 0, waiting = 0;
  for (const char* name : {"first", "second"}) {
    running += metrics.value("moelora_adapter_requests_running", "adapter", name);
    waiting += metrics.value("moelora_adapter_requests_waiting", "adapter", name);
  }
  CHECK(running <= 2);
  CHECK(running + waiting == 5);
  for (const moelora_request request : requests) {
    REQUIRE(moelora_request_cancel(host.engine, request, 0, nullptr) == MOELORA_OK);
    REQUIRE(moelora_request_close(host.engine, request, nullptr) == MOELORA_OK);
  }
}

TEST_CASE("series of adapters are bounded by metrics_adapters: those with the most requests") {
  Options options;
  options.metrics_adapters = 2;
  const Host host(options);
  const moelora_adapter one = load_as(host, "one", "attn");
  load_as(host, "none", "attn");
  const moelora_adapter three = load_as(host, "three", "experts");
  for (int i = 0; i < 3; ++i) {
    CHECK(host.answer(kPrompt, 1, three).size() == 1);
  }
  CHECK(host.answer(kPrompt, 1, one).size() == 1);
  const PrometheusReader metrics = read_metrics(host);
  const Family& family = metrics.family("moelora_adapter_requests_total");
  REQUIRE(family.samples.size() == 2);
  CHECK(family.samples[0].first.at("adapter") == "one");  // in order of loading
  CHECK(family.samples[0].second == 1);
  CHECK(family.samples[1].first.at("adapter") == "three");
  CHECK(family.samples[1].second == 3);
  CHECK(metrics.value("moelora_adapters_registered") == 3);

  options.metrics_adapters = 0;
  const Host silent(options);
  load_as(silent, "one", "attn");
  CHECK(read_metrics(silent).family("moelora_adapter_requests_total").samples.empty());
}
