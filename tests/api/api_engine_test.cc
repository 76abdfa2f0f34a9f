// SPDX-License-Identifier: Apache-2.0
// The engine as a whole through the public API: what it says about itself, handles and references, metrics, sampling
// defaults, and the experimental header.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>

#include "tests/api/host.h"

using namespace moelora_host;

namespace {

const std::vector<int32_t> kPrompt = {52, 20, 29, 93, 163, 281, 246};

}  // namespace

TEST_CASE("engine info says what was got") {
  const Host host;
  moelora_engine_info info;
  moelora_engine_info_init(&info);
  REQUIRE(moelora_engine_info_get(host.engine, &info, nullptr) == MOELORA_OK);
  CHECK(info.num_layers == 2);
  CHECK(info.num_experts == 8);
  CHECK(info.num_experts_active == 2);
  CHECK(info.hidden_size == 64);
  CHECK(info.intermediate_size == 48);
  CHECK(info.vocab_size == 320);
  CHECK(info.max_context_tokens == 512);
  CHECK(info.max_num_sequences == 8);
  CHECK(info.num_threads == 2);
  CHECK(info.bos_token == 1);
  CHECK(info.eos_token == 2);
  CHECK(std::string(info.architecture) == "Qwen3MoeForCausalLM");
  CHECK(std::string(info.dtype) == "BF16");
  CHECK(info.weight_bytes > 200000);
  CHECK(info.pool_bytes % info.page_bytes == 0);
  CHECK(moelora_engine_health(host.engine, nullptr) == MOELORA_OK);
  CHECK(moelora_engine_trim(host.engine, 0, nullptr) == MOELORA_OK);
}

TEST_CASE("handles of another type, another engine, another time") {
  const Host host;
  const Host other;
  Err err;
  const moelora_adapter attn = host.load("attn");
  const moelora_request request = host.build(kPrompt, 2);
  CHECK(moelora_request_cancel(host.engine, attn, 0, err) == MOELORA_E_HANDLE);
  CHECK(err.names("adapter"));
  CHECK(moelora_request_set_adapter(host.engine, request, request, 1.0f, err) == MOELORA_E_HANDLE);
  CHECK(moelora_request_submit(other.engine, request, err) == MOELORA_E_HANDLE);
  CHECK(moelora_adapter_pin(other.engine, attn, err) == MOELORA_E_HANDLE);
  CHECK(moelora_request_submit(host.engine, 0, err) == MOELORA_E_HANDLE);
  CHECK(moelora_request_submit(host.engine, ~uint64_t{0}, err) == MOELORA_E_HANDLE);
  CHECK(moelora_request_submit(nullptr, request, err) == MOELORA_E_INVALID);
  REQUIRE(moelora_request_close(host.engine, request, err) == MOELORA_OK);
  // The slot is used again and again; the old number stays dead.
  for (int i = 0; i < 100000; ++i) {
    moelora_request next = 0;
    if (moelora_request_create(host.engine, &next, nullptr) != MOELORA_OK || next == request ||
        moelora_request_close(host.engine, next, nullptr) != MOELORA_OK) {
      FAIL("round " << i);
    }
  }
  CHECK(moelora_request_submit(host.engine, request, err) == MOELORA_E_HANDLE);
}

TEST_CASE("references, release, drain") {
  Err err;
  auto host = std::make_unique<Host>();
  moelora_engine* engine = host->engine;
  moelora_engine_retain(engine);
  host.reset();
  CHECK(moelora_engine_health(engine, err) == MOELORA_OK);
  CHECK(moelora_engine_drain(engine, 1000, err) == MOELORA_OK);
  moelora_request request = 0;
  REQUIRE(moelora_request_create(engine, &request, err) == MOELORA_OK);
  REQUIRE(moelora_request_set_tokens(engine, request, kPrompt.data(), kPrompt.size(), err) == MOELORA_OK);
  CHECK(moelora_request_submit(engine, request, err) == MOELORA_E_CLOSED);
  moelora_engine_release(engine);
  CHECK(moelora_engine_health(engine, err) == MOELORA_E_HANDLE);
  CHECK(moelora_request_submit(engine, request, err) == MOELORA_E_HANDLE);
  moelora_engine_release(engine);
}

TEST_CASE("stats and metrics") {
  const Host host;
  Err err;
  const std::string odd_name = "quo\"te\\back\nline";
  const std::string dir = adapter_dir("experts");
  moelora_adapter adapter = 0;
  REQUIRE(moelora_adapter_load_dir(host.engine, odd_name.data(), odd_name.size(), dir.data(), dir.size(), 0, &adapter,
                                   err) == MOELORA_OK);
  CHECK(host.answer(kPrompt, 6, adapter).size() == 6);
  CHECK(host.answer(kPrompt, 4).size() == 4);
  moelora_stats stats;
  moelora_stats_init(&stats);
  REQUIRE(moelora_engine_drain(host.engine, 10000, err) == MOELORA_OK);
  REQUIRE(moelora_stats_get(host.engine, &stats, err) == MOELORA_OK);
  CHECK(stats.requests_submitted == 2);
  CHECK(stats.requests_finished == 2);
  CHECK(stats.requests_failed == 0);
  CHECK(stats.output_tokens == 10);
  CHECK(stats.prompt_tokens == 14);
  CHECK(stats.adapter_loads == 1);
  CHECK(stats.adapters_registered == 1);
  CHECK(stats.pages_total == stats.pages_free + stats.pages_kv + stats.pages_adapter);
  CHECK(stats.active_experts >= 2.0);
  CHECK(stats.active_experts <= 8.0);
  moelora_adapter_stats own;
  moelora_adapter_stats_init(&own);
  REQUIRE(moelora_adapter_stats_get(host.engine, adapter, &own, err) == MOELORA_OK);
  CHECK(own.requests == 1);
  CHECK(own.output_tokens == 6);
  CHECK(own.loads == 1);

  size_t n = 0;
  CHECK(moelora_metrics_text(host.engine, nullptr, 0, &n, err) == MOELORA_MORE);
  std::string text(n, '\0');
  REQUIRE(moelora_metrics_text(host.engine, text.data(), text.size(), &n, err) == MOELORA_OK);
  text.resize(n);
  CHECK(text.find("# TYPE moelora_output_tokens_total counter\nmoelora_output_tokens_total 10\n") != std::string::npos);
  CHECK(text.find("moelora_adapter_output_tokens_total{adapter=\"quo\\\"te\\\\back\\nline\",id=\"") !=
        std::string::npos);
  // Every line is a comment or `name[{labels}] value`.
  std::istringstream lines(text);
  size_t samples = 0;
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("# ", 0) == 0) {
      continue;
    }
    CHECK(line.rfind("moelora_", 0) == 0);
    const size_t space = line.rfind(' ');
    REQUIRE(space != std::string::npos);
    size_t used = 0;
    (void)std::stod(line.substr(space + 1), &used);
    CHECK(used == line.size() - space - 1);
    ++samples;
  }
  CHECK(samples >= 29);
  CHECK(text.back() == '\n');
}

TEST_CASE("sampling defaults of the model change only what it recommends") {
  const Host host;
  moelora_sampling sampling = greedy(9);
  REQUIRE(moelora_sampling_from_model(host.engine, &sampling, nullptr) == MOELORA_OK);
  CHECK(sampling.max_tokens == 9);  // its generation_config.json recommends nothing
  CHECK(sampling.temperature == 0.0f);
  CHECK(sampling.top_p == 1.0f);

  // The same model with recommendations.
  const auto folder = std::filesystem::temp_directory_path() /
                      ("moelora_sampling_" + std::to_string(static_cast<unsigned long>(getpid())));
  std::filesystem::create_directories(folder);
  std::filesystem::copy(model_dir(), folder, std::filesystem::copy_options::recursive);
  std::ofstream(folder / "generation_config.json")
      << R"({"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05})";
  moelora_config* config = nullptr;
  REQUIRE(moelora_config_create(MOELORA_ABI_VERSION, &config, nullptr) == MOELORA_OK);
  REQUIRE(moelora_config_set_int(config, "device_memory_bytes", MOELORA_STRLEN, 16 << 20, nullptr) == MOELORA_OK);
  moelora_engine* engine = nullptr;
  const moelora_status status = moelora_engine_create(config, folder.c_str(), MOELORA_STRLEN, &engine, nullptr);
  moelora_config_destroy(config);
  std::filesystem::remove_all(folder);
  REQUIRE(status == MOELORA_OK);
  CHECK(moelora_sampling_from_model(engine, &sampling, nullptr) == MOELORA_OK);
  moelora_engine_release(engine);
  CHECK(sampling.temperature == 0.7f);
  CHECK(sampling.top_k == 20);
  CHECK(sampling.top_p == 0.8f);
  CHECK(sampling.repetition_penalty == 1.05f);
  CHECK(sampling.max_tokens == 9);
}

TEST_CASE("experimental: random adapters, records, bandwidth") {
  const Host host;
  Err err;
  moelora_adapter adapter = 0;
  const uint32_t both = MOELORA_RANDOM_ATTENTION | MOELORA_RANDOM_EXPERTS;
  REQUIRE(moelora_adapter_load_random(host.engine, "r8", 2, 8, both, 1, &adapter, err) == MOELORA_OK);
  moelora_adapter_info info;
  moelora_adapter_info_init(&info);
  REQUIRE(moelora_adapter_info_get(host.engine, adapter, &info, err) == MOELORA_OK);
  CHECK(info.max_rank == 8);
  CHECK(info.num_experts == 8);
  moelora_adapter refused = 0;
  CHECK(moelora_adapter_load_random(host.engine, "x", 1, 0, both, 1, &refused, err) == MOELORA_E_INVALID);
  CHECK(moelora_adapter_load_random(host.engine, "x", 1, 100000, both, 1, &refused, err) == MOELORA_E_ADAPTER_MISMATCH);
  CHECK(moelora_adapter_load_random(host.engine, "x", 1, 8, 0, 1, &refused, err) == MOELORA_E_INVALID);
  CHECK(info.read_ms == 0);
  CHECK(info.pack_ms > 0);
  CHECK(info.upload_ms == 0);
  CHECK(host.answer(kPrompt, 8, adapter).size() == 8);
  REQUIRE(moelora_adapter_info_get(host.engine, adapter, &info, err) == MOELORA_OK);
  CHECK(info.upload_ms > 0);
  moelora_adapter clone = 0;
  REQUIRE(moelora_adapter_clone(host.engine, adapter, "c", 1, 0.5f, &clone, err) == MOELORA_OK);
  moelora_adapter_info copied;
  moelora_adapter_info_init(&copied);
  REQUIRE(moelora_adapter_info_get(host.engine, clone, &copied, err) == MOELORA_OK);
  CHECK(copied.upload_ms == info.upload_ms);
  CHECK(copied.pack_ms == info.pack_ms);
  moelora_step_record records[64];
  size_t n = 0;
  REQUIRE(moelora_step_records(host.engine, records, 64, &n, err) == MOELORA_OK);
  REQUIRE(n >= 8);
  CHECK(records[0].prefill_rows > 0);
  CHECK(records[n - 1].prefill_rows == 0);
  CHECK(records[n - 1].rows == 1);
  CHECK(records[n - 1].adapters == 1);
  CHECK(records[n - 1].lora_bytes > 0);
  double bytes = 0, less = 0, bandwidth = 0;
  REQUIRE(moelora_weight_bytes(host.engine, 2, &less, err) == MOELORA_OK);
  REQUIRE(moelora_weight_bytes(host.engine, 3, &bytes, err) == MOELORA_OK);
  CHECK(bytes - less == 2.0 * 3 * 48 * 64 * 2);  // one more expert in 2 layers, bf16
  CHECK(moelora_weight_bytes(host.engine, -1, &bytes, err) == MOELORA_E_INVALID);
  REQUIRE(moelora_measure_read_bandwidth(host.engine, &bandwidth, err) == MOELORA_OK);
  CHECK(bandwidth > 1e8);
}
