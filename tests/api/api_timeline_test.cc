// SPDX-License-Identifier: Apache-2.0
// moelora_timeline_write: a JSON document whose events agree with the counters of the same engine.
#include <unistd.h>

#include <filesystem>
#include <map>

#include "tests/api/host.h"

using namespace moelora_host;
using nlohmann::json;

namespace {

const std::vector<int32_t> kPrompt = {52, 20, 29, 93, 163, 281, 246};

struct Timeline {
  json document;
  std::vector<json> steps, uploads, begins, ends, counters;

  explicit Timeline(const Host& host) {
    const auto path = std::filesystem::temp_directory_path() /
                      ("moelora_timeline_" + std::to_string(static_cast<unsigned long>(getpid())) + ".json");
    Err err;
    INFO(err.message());
    REQUIRE(moelora_timeline_write(host.engine, path.c_str(), MOELORA_STRLEN, err) == MOELORA_OK);
    document = json::parse(std::ifstream(path));
    std::filesystem::remove(path);
    std::map<int, std::string> tracks;
    for (const json& event : document.at("traceEvents")) {
      const std::string phase = event.at("ph");
      CHECK(event.at("pid") == 1);
      if (phase == "M") {
        if (event.at("name") == "thread_name") {
          tracks[event.at("tid")] = event.at("args").at("name");
        }
        continue;
      }
      CHECK(event.at("ts").get<double>() > 0);
      if (phase == "X") {
        CHECK(event.at("dur").get<double>() >= 0);
        (tracks.at(event.at("tid")) == "steps" ? steps : uploads).push_back(event);
      } else if (phase == "C") {
        counters.push_back(event);
      } else {
        REQUIRE((phase == "b" || phase == "e"));
        (phase == "b" ? begins : ends).push_back(event);
      }
    }
  }
};

int64_t sum_of(const std::vector<json>& events, const char* argument) {
  int64_t sum = 0;
  for (const json& event : events) {
    sum += event.at("args").at(argument).get<int64_t>();
  }
  return sum;
}

moelora_stats stats_of(const Host& host) {
  moelora_stats stats;
  moelora_stats_init(&stats);
  REQUIRE(moelora_engine_drain(host.engine, 10000, nullptr) == MOELORA_OK);
  REQUIRE(moelora_stats_get(host.engine, &stats, nullptr) == MOELORA_OK);
  return stats;
}

}  // namespace

TEST_CASE("a timeline agrees with the stats") {
  Options options;
  options.timeline_events = 4096;
  options.max_adapters_resident = 1;  // the two take turns
  const Host host(options);
  const std::string odd_name = "quo\"te\\ta\tb";
  const std::string dir = adapter_dir("experts");
  moelora_adapter odd = 0;
  REQUIRE(moelora_adapter_load_dir(host.engine, odd_name.data(), odd_name.size(), dir.data(), dir.size(), 0, &odd,
                                   nullptr) == MOELORA_OK);
  const moelora_adapter attn = host.load("attn");
  for (const moelora_adapter adapter : {odd, attn, odd, moelora_adapter{0}}) {
    CHECK(host.answer(kPrompt, 5, adapter).size() == 5);
  }
  const moelora_stats stats = stats_of(host);
  const Timeline timeline(host);
  CHECK(timeline.document.at("otherData").at("dropped_events") == 0);

  REQUIRE(timeline.steps.size() == stats.steps);
  // Each output token but a request's last one is a row of a later step.
  CHECK(sum_of(timeline.steps, "rows") ==
        static_cast<int64_t>(stats.prompt_tokens + stats.output_tokens - stats.requests_finished));
  CHECK(sum_of(timeline.steps, "prefill_rows") == static_cast<int64_t>(stats.prompt_tokens));
  CHECK(sum_of(timeline.steps, "loads") == static_cast<int64_t>(stats.adapter_loads));
  double end = 0, busy = 0;
  for (size_t i = 0; i < timeline.steps.size(); ++i) {
    const json& step = timeline.steps[i];
    CHECK(step.at("args").at("step") == i);
    CHECK(step.at("name") == (step.at("args").at("prefill_rows") == 0 ? "decode" : "prefill"));
    CHECK(step.at("ts").get<double>() >= end - 0.002);  // one after the other, but for the rounding
    end = step.at("ts").get<double>() + step.at("dur").get<double>();
    busy += step.at("dur").get<double>();
  }
  CHECK(std::abs(busy / 1e3 - stats.steps_ms) < 0.001 * static_cast<double>(stats.steps));

  REQUIRE(timeline.uploads.size() == 3);
  CHECK(stats.adapter_loads == 3);
  CHECK(timeline.uploads[0].at("name") == odd_name);
  CHECK(timeline.uploads[1].at("name") == "attn");
  CHECK(timeline.uploads[2].at("name") == odd_name);
  CHECK(sum_of(timeline.uploads, "bytes") == static_cast<int64_t>(stats.adapter_load_bytes));

  for (const json& counter : timeline.counters) {
    int64_t sum = 0;
    for (const auto& value : counter.at("args")) {
      CHECK(value.get<int64_t>() >= 0);
      sum += value.get<int64_t>();
    }
    CHECK((counter.at("name") != "pages" || sum == stats.pages_total));
  }
  CHECK(timeline.counters.size() == 2 * stats.steps);
}

TEST_CASE("requests of a timeline have their phases") {
  Options options;
  options.timeline_events = 4096;
  const Host host(options);
  const moelora_adapter attn = host.load("attn");
  CHECK(host.answer(kPrompt, 5, attn).size() == 5);
  CHECK(host.answer(kPrompt, 3).size() == 3);
  (void)stats_of(host);
  const Timeline timeline(host);
  REQUIRE(timeline.begins.size() == 2 * 4);
  REQUIRE(timeline.ends.size() == 2 * 4);
  std::map<std::string, std::pair<double, double>> spans;  // id/name -> begin, end
  for (const json& event : timeline.begins) {
    spans[std::to_string(event.at("id").get<int>()) + "/" + event.at("name").get<std::string>()].first = event.at("ts");
  }
  for (const json& event : timeline.ends) {
    spans[std::to_string(event.at("id").get<int>()) + "/" + event.at("name").get<std::string>()].second =
        event.at("ts");
  }
  for (const auto& [id, name] : std::map<std::string, std::string>{{"1/", "attn"}, {"2/", "base"}}) {
    INFO(id << name);
    const auto whole = spans.at(id + name), queued = spans.at(id + "queued"), prefill = spans.at(id + "prefill"),
               decode = spans.at(id + "decode");
    CHECK(whole.first == queued.first);
    CHECK(queued.first <= queued.second);
    CHECK(queued.second == prefill.first);
    CHECK(prefill.first < prefill.second);
    CHECK(prefill.second == decode.first);
    CHECK(decode.first < decode.second);
    CHECK(decode.second == whole.second);
  }
  CHECK(timeline.begins[0].at("args").at("output_tokens") == 5);
  CHECK(timeline.begins[0].at("args").at("prompt_tokens") == 7);
}

TEST_CASE("a timeline keeps the newest events, and says how many left") {
  Options options;
  options.timeline_events = 8;
  const Host host(options);
  CHECK(host.answer(kPrompt, 30).size() == 30);
  const moelora_stats stats = stats_of(host);
  const Timeline timeline(host);
  REQUIRE(stats.steps == 30);
  REQUIRE(timeline.steps.size() == 7);  // and the request's end
  CHECK(timeline.document.at("otherData").at("dropped_events") == 23);
  CHECK(timeline.steps.back().at("args").at("step") == 29);
}

TEST_CASE("a timeline that is off or cannot be written is refused") {
  Err err;
  const Host off;
  CHECK(moelora_timeline_write(off.engine, "/tmp/x.json", MOELORA_STRLEN, err) == MOELORA_E_INVALID);
  CHECK(err.names("timeline_events"));
  Options options;
  options.timeline_events = 8;
  const Host on(options);
  CHECK(moelora_timeline_write(on.engine, "/nowhere/at/all.json", MOELORA_STRLEN, err) == MOELORA_E_IO);
  CHECK(err.names("/nowhere/at/all.json"));
  CHECK(moelora_timeline_write(on.engine, "", 0, err) == MOELORA_E_INVALID);
}
