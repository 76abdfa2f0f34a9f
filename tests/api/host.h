// SPDX-License-Identifier: Apache-2.0
// A host program in small: an engine over the public API on the reference case qwen3_moe, and what its reference
// implementation answered. Only the public headers are included.
#pragma once

#include <moelora.h>
#include <moelora_experimental.h>

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/catch.h"

namespace moelora_host {

inline std::string case_dir() {
  return std::string(MOELORA_SOURCE_DIR) + "/tests/data/cases/qwen3_moe";
}
inline std::string model_dir() {
  return case_dir() + "/model";
}
inline std::string adapter_dir(const std::string& name) {
  return case_dir() + "/adapters/" + name;
}

struct Err {
  moelora_error error;
  Err() { moelora_error_init(&error); }
  operator moelora_error*() { return &error; }
  [[nodiscard]] std::string message() const { return error.message; }
  [[nodiscard]] bool names(const std::string& text) const { return message().find(text) != std::string::npos; }
};

inline moelora_sampling greedy(int32_t max_tokens) {
  moelora_sampling sampling;
  moelora_sampling_init(&sampling);
  sampling.max_tokens = max_tokens;
  sampling.flags = MOELORA_SAMPLING_IGNORE_EOS;
  return sampling;
}

struct Options {
  int64_t max_num_sequences = 8;
  int64_t output_buffer_tokens = 4096;
  int64_t max_adapters_resident = 64;
  int64_t max_queued_requests = 1024;
  std::string overrun = "pause";
  int64_t timeline_events = 0;
  int64_t metrics_adapters = 256;
};

class Host {
 public:
  explicit Host(const Options& options = {}, const std::string& dir = model_dir()) {
    moelora_config* config = nullptr;
    Err err;
    INFO(err.message());
    REQUIRE(moelora_config_create(MOELORA_ABI_VERSION, &config, err) == MOELORA_OK);
    set(config, "num_threads", 2);
    set(config, "device_memory_bytes", int64_t{64} << 20);
    set(config, "max_num_sequences", options.max_num_sequences);
    set(config, "max_batch_tokens", 64);
    set(config, "output_buffer_tokens", options.output_buffer_tokens);
    set(config, "max_adapters_resident", options.max_adapters_resident);
    set(config, "max_queued_requests", options.max_queued_requests);
    set(config, "timeline_events", options.timeline_events);
    set(config, "metrics_adapters", options.metrics_adapters);
    REQUIRE(moelora_config_set_str(config, "overrun", MOELORA_STRLEN, options.overrun.c_str(), MOELORA_STRLEN, err) ==
            MOELORA_OK);
    const moelora_status status = moelora_engine_create(config, dir.data(), dir.size(), &engine, err);
    moelora_config_destroy(config);
    if (status != MOELORA_OK) {
      FAIL("engine_create: " << err.message());
    }
  }
  ~Host() { moelora_engine_release(engine); }
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  moelora_adapter load(const std::string& name, uint32_t flags = 0) const {
    moelora_adapter adapter = 0;
    Err err;
    const std::string dir = adapter_dir(name);
    const moelora_status status =
        moelora_adapter_load_dir(engine, name.data(), name.size(), dir.data(), dir.size(), flags, &adapter, err);
    if (status != MOELORA_OK) {
      FAIL("adapter " << name << ": " << err.message());
    }
    return adapter;
  }
  [[nodiscard]] moelora_request build(const std::vector<int32_t>& prompt, int32_t max_tokens,
                                      moelora_adapter adapter = 0) const {
    moelora_request request = 0;
    REQUIRE(moelora_request_create(engine, &request, nullptr) == MOELORA_OK);
    REQUIRE(moelora_request_set_tokens(engine, request, prompt.data(), prompt.size(), nullptr) == MOELORA_OK);
    const moelora_sampling sampling = greedy(max_tokens);
    REQUIRE(moelora_request_set_sampling(engine, request, &sampling, nullptr) == MOELORA_OK);
    if (adapter != 0) {
      REQUIRE(moelora_request_set_adapter(engine, request, adapter, 1.0f, nullptr) == MOELORA_OK);
    }
    return request;
  }
  [[nodiscard]] moelora_request submit(const std::vector<int32_t>& prompt, int32_t max_tokens,
                                       moelora_adapter adapter = 0) const {
    const moelora_request request = build(prompt, max_tokens, adapter);
    Err err;
    if (moelora_request_submit(engine, request, err) != MOELORA_OK) {
      FAIL("submit: " << err.message());
    }
    return request;
  }
  // Reads to the end in chunks; the final status is END.
  [[nodiscard]] std::vector<int32_t> read_all(moelora_request request, size_t chunk_tokens = 64) const {
    std::vector<int32_t> all;
    std::vector<int32_t> buffer(chunk_tokens);
    for (;;) {
      moelora_chunk chunk;
      moelora_chunk_init(&chunk);
      Err err;
      const moelora_status status =
          moelora_request_read(engine, request, 60000, buffer.data(), buffer.size(), nullptr, 0, &chunk, err);
      if (status == MOELORA_END) {
        return all;
      }
      if (status != MOELORA_OK) {
        FAIL("read: " << moelora_status_name(status) << " " << err.message());
      }
      CHECK(chunk.first_position == static_cast<int32_t>(all.size()));
      all.insert(all.end(), buffer.begin(), buffer.begin() + chunk.num_tokens);
    }
  }
  [[nodiscard]] std::vector<int32_t> answer(const std::vector<int32_t>& prompt, int32_t max_tokens,
                                            moelora_adapter adapter = 0, float scale = 1.0f) const {
    std::vector<int32_t> tokens(static_cast<size_t>(max_tokens));
    const moelora_sampling sampling = greedy(max_tokens);
    size_t n = 0;
    Err err;
    const moelora_status status = moelora_generate_tokens(engine, adapter, scale, prompt.data(), prompt.size(),
                                                          &sampling, tokens.data(), tokens.size(), &n, nullptr, err);
    if (status != MOELORA_OK) {
      FAIL("generate: " << err.message());
    }
    tokens.resize(n);
    return tokens;
  }

  moelora_engine* engine = nullptr;

 private:
  static void set(moelora_config* config, const char* key, int64_t value) {
    REQUIRE(moelora_config_set_int(config, key, MOELORA_STRLEN, value, nullptr) == MOELORA_OK);
  }
};

// What the reference implementation answered greedily, where its choice was not close.
struct Reference {
  std::vector<int32_t> prompt;
  std::vector<int32_t> greedy;
};
inline Reference reference(const std::string& adapter, size_t prompt_tokens) {
  std::ifstream file(case_dir() + "/expected.json");
  const nlohmann::json expected = nlohmann::json::parse(file);
  for (const auto& entry : expected.at("cases")) {
    const std::string name = entry.at("adapter").is_null() ? "" : entry.at("adapter").get<std::string>();
    if (name != adapter || entry.at("prompt").size() != prompt_tokens) {
      continue;
    }
    return {entry.at("prompt").get<std::vector<int32_t>>(), entry.at("greedy").get<std::vector<int32_t>>()};
  }
  FAIL("no reference for " << adapter);
  return {};
}

}  // namespace moelora_host
