// SPDX-License-Identifier: Apache-2.0
// Statuses, error texts, struct sizes, versions, configuration and log: what needs no model.
#include <cstdlib>
#include <filesystem>
#include <set>
#include <thread>

#include "tests/api/host.h"

using moelora_host::Err;

namespace {

bool valid_utf8(const std::string& text) {
  // Independent of the library's: nlohmann refuses to dump what is not UTF-8.
  try {
    (void)nlohmann::json(text).dump();
    return true;
  } catch (const nlohmann::json::type_error&) {
    return false;
  }
}

struct Config {
  moelora_config* config = nullptr;
  Config() { REQUIRE(moelora_config_create(MOELORA_ABI_VERSION, &config, nullptr) == MOELORA_OK); }
  ~Config() { moelora_config_destroy(config); }
  moelora_status set(const std::string& key, const std::string& value, moelora_error* err) {
    return moelora_config_set_str(config, key.data(), key.size(), value.data(), value.size(), err);
  }
};

}  // namespace

TEST_CASE("versions and status names") {
  CHECK(moelora_version() == 100);
  CHECK(std::string(moelora_version_string()) == "0.1.0");
  CHECK(moelora_abi_version() == MOELORA_ABI_VERSION);
  CHECK(std::string(moelora_build_info()).find("0.1.0") != std::string::npos);
  std::set<std::string> names;
  for (int32_t status = MOELORA_E_INTERNAL; status <= MOELORA_MORE; ++status) {
    names.insert(moelora_status_name(status));
  }
  CHECK(names.size() == 30);
  CHECK(names.count("unknown") == 0);
  CHECK(std::string(moelora_status_name(MOELORA_E_ADAPTER_MISMATCH)) == "E_ADAPTER_MISMATCH");
  CHECK(std::string(moelora_status_name(MOELORA_E_CONTEXT_LENGTH)) == "E_CONTEXT_LENGTH");
  CHECK(std::string(moelora_status_name(MOELORA_E_FORKED)) == "E_FORKED");
  CHECK(std::string(moelora_status_name(5)) == "unknown");
  CHECK(std::string(moelora_status_name(-26)) == "unknown");
  CHECK(std::string(moelora_status_name(INT32_MIN)) == "unknown");
}

TEST_CASE("another ABI is refused, naming both") {
  moelora_config* config = nullptr;
  Err err;
  CHECK(moelora_config_create(7, &config, err) == MOELORA_E_ABI);
  CHECK(config == nullptr);
  CHECK(err.names("ABI 7"));
  CHECK(err.names("0.1.0"));
}

TEST_CASE("success leaves the error struct alone, NULL is allowed, a wrong size is refused") {
  Err err;
  std::strcpy(err.error.message, "mine");
  err.error.status = 77;
  moelora_config* config = nullptr;
  REQUIRE(moelora_config_create(MOELORA_ABI_VERSION, &config, err) == MOELORA_OK);
  CHECK(err.message() == "mine");
  CHECK(err.error.status == 77);
  CHECK(moelora_config_set_int(config, "no_such", MOELORA_STRLEN, 1, nullptr) == MOELORA_E_INVALID);
  for (const uint32_t size : {0u, 1u, 511u, 65537u}) {
    err.error.struct_size = size;
    CHECK(moelora_config_set_int(config, "num_threads", MOELORA_STRLEN, 1, err) == MOELORA_E_STRUCT_SIZE);
    CHECK(err.message() == "mine");
  }
  // A newer host's larger struct: what lies beyond ours stays.
  struct Larger {
    moelora_error error;
    char tail[64];
  } larger;
  std::memset(&larger, 0x5a, sizeof larger);
  larger.error.struct_size = sizeof larger;
  CHECK(moelora_config_set_int(config, "no_such", MOELORA_STRLEN, 1, &larger.error) == MOELORA_E_INVALID);
  CHECK(std::string(larger.error.message).find("no_such") != std::string::npos);
  CHECK(larger.tail[0] == 0x5a);
  moelora_config_destroy(config);
}

TEST_CASE("long and invalid texts in messages stay UTF-8 and terminated") {
  Config config;
  Err err;
  for (size_t shift = 0; shift < 3; ++shift) {
    std::string path(shift, 'x');
    for (int i = 0; i < 1000; ++i) {
      path += "\xe2\x82\xac";  // the euro sign, 3 bytes
    }
    std::memset(err.error.message, 0x7f, sizeof err.error.message);
    CHECK(moelora_config_load_toml(config.config, path.data(), path.size(), err) == MOELORA_E_IO);
    const size_t length = strnlen(err.error.message, sizeof err.error.message);
    CHECK(length < sizeof err.error.message);
    CHECK(length > sizeof err.error.message - 5);
    CHECK(valid_utf8(err.message()));
  }
  CHECK(moelora_config_load_toml(config.config, "/no\xff/such", MOELORA_STRLEN, err) == MOELORA_E_IO);
  CHECK(err.names("/no?/such"));
}

TEST_CASE("a struct that was not initialised is refused") {
  Err err;
  moelora_device_info info;
  for (const uint32_t size : {0u, 1u, 127u, 65537u}) {
    moelora_device_info_init(&info);
    info.struct_size = size;
    CHECK(moelora_device_info_get(0, &info, err) == MOELORA_E_STRUCT_SIZE);
    CHECK(err.names("init macro"));
  }
  moelora_device_info_init(&info);
  CHECK(moelora_device_info_get(0, &info, err) == MOELORA_OK);
  CHECK(info.kind == MOELORA_DEVICE_CPU);
  CHECK(info.memory_bytes > info.memory_free_bytes);
  CHECK(info.num_units >= 1);
  CHECK(info.struct_size == sizeof info);
  CHECK(moelora_device_info_get(5, &info, err) == MOELORA_E_NO_DEVICE);
  CHECK(moelora_device_info_get(0, nullptr, err) == MOELORA_E_INVALID);
  int32_t count = 0;
  CHECK(moelora_device_count(&count, err) == MOELORA_OK);
  CHECK(count == 1);

  moelora_sampling sampling;
  std::memset(&sampling, 0xff, sizeof sampling);
  moelora_sampling_init(&sampling);
  CHECK(sampling.struct_size == sizeof sampling);
  CHECK(sampling.temperature == 0.0f);
  CHECK(sampling.top_p == 1.0f);
  CHECK(sampling.repetition_penalty == 1.0f);
  CHECK(sampling.logprobs == -1);
  CHECK(sampling.max_tokens == 16);
  CHECK(sampling.n == 1);
  CHECK(sampling.reserved == 0);
}

TEST_CASE("configuration keys") {
  Config config;
  Err err;
  const size_t count = moelora_config_key_count();
  REQUIRE(count >= 20);
  for (size_t i = 0; i < count; ++i) {
    const char* name = nullptr;
    const char* default_text = nullptr;
    const char* help = nullptr;
    int32_t type = -1;
    REQUIRE(moelora_config_key_at(i, &name, &type, &default_text, &help, err) == MOELORA_OK);
    INFO(name);
    CHECK(std::strlen(help) > 5);
    CHECK(type >= MOELORA_TYPE_STRING);
    CHECK(type <= MOELORA_TYPE_BOOL);
    CHECK(config.set(name, default_text, err) == MOELORA_OK);
  }
  CHECK(moelora_config_key_at(count, nullptr, nullptr, nullptr, nullptr, err) == MOELORA_E_NOT_FOUND);

  CHECK(config.set("num_thread", "1", err) == MOELORA_E_INVALID);
  CHECK(err.names("num_threads"));
  CHECK(config.set("zzzzzz", "1", err) == MOELORA_E_INVALID);
  CHECK(!err.names("near"));
  CHECK(config.set("max_lora_rank", "0", err) == MOELORA_E_INVALID);
  CHECK(err.names("max_lora_rank"));
  CHECK(err.names("1 to"));
  CHECK(config.set("compute", "fp8", err) == MOELORA_E_INVALID);
  CHECK(err.names("bf16"));
  CHECK(moelora_config_set_num(config.config, "device_memory_fraction", MOELORA_STRLEN, std::strtod("nan", nullptr),
                               err) == MOELORA_E_INVALID);
  CHECK(moelora_config_set_int(config.config, "deterministic", MOELORA_STRLEN, 1, err) == MOELORA_OK);
  CHECK(moelora_config_set_int(config.config, "deterministic", MOELORA_STRLEN, 2, err) == MOELORA_E_INVALID);
  CHECK(moelora_config_set_str(config.config, nullptr, 3, "x", 1, err) == MOELORA_E_INVALID);
}

TEST_CASE("TOML: all or nothing, with line and key") {
  Config config;
  Err err;
  const auto load = [&](const std::string& text) {
    return moelora_config_load_toml_mem(config.config, text.data(), text.size(), err);
  };
  CHECK(load("# a comment\nnum_threads = 3\ncompute = \"bf16\"\ndeterministic = true\n") == MOELORA_OK);
  CHECK(load("num_threads = 4\n\nmax_lora_rnk = 8\n") == MOELORA_E_INVALID);
  CHECK(err.names(":3:"));
  CHECK(err.names("max_lora_rank"));
  CHECK(load("num_threads = \"many\"") == MOELORA_E_INVALID);
  CHECK(load("num_threads = = 4") == MOELORA_E_CORRUPT);
  CHECK(err.names(":1:"));
  CHECK(load("num_threads = [1]") == MOELORA_E_INVALID);
  CHECK(load("a = " + std::string(100000, '[')) == MOELORA_E_CORRUPT);
  std::string dotted = "a";
  for (int i = 0; i < 100000; ++i) {
    dotted += ".a";
  }
  CHECK(load(dotted + " = 1") == MOELORA_E_CORRUPT);
  CHECK(load(std::string(2u << 20, '#')) == MOELORA_E_INVALID);
  CHECK(moelora_config_load_toml(config.config, "/no/such/file.toml", MOELORA_STRLEN, err) == MOELORA_E_IO);
  CHECK(err.names("/no/such/file.toml"));
  const std::string folder = std::filesystem::temp_directory_path().string();
  CHECK(moelora_config_load_toml(config.config, folder.data(), folder.size(), err) == MOELORA_E_IO);
}

TEST_CASE("pointers that are no objects are recognised") {
  Err err;
  char stack[64] = {};
  auto* config = reinterpret_cast<moelora_config*>(stack);
  CHECK(moelora_config_set_int(config, "num_threads", MOELORA_STRLEN, 1, err) == MOELORA_E_HANDLE);
  CHECK(moelora_config_set_int(nullptr, "num_threads", MOELORA_STRLEN, 1, err) == MOELORA_E_INVALID);
  moelora_config_destroy(config);
  moelora_config_destroy(nullptr);
  moelora_queue* queue = nullptr;
  REQUIRE(moelora_queue_create(&queue, err) == MOELORA_OK);
  CHECK(moelora_config_set_int(reinterpret_cast<moelora_config*>(queue), "num_threads", MOELORA_STRLEN, 1, err) ==
        MOELORA_E_HANDLE);
  CHECK(moelora_engine_health(reinterpret_cast<moelora_engine*>(queue), err) == MOELORA_E_HANDLE);
  moelora_queue_destroy(queue);
  moelora_queue_destroy(queue);
  CHECK(moelora_queue_wake(queue, err) == MOELORA_E_HANDLE);
  // The value is not given to another object.
  for (int i = 0; i < 1000; ++i) {
    moelora_queue* other = nullptr;
    REQUIRE(moelora_queue_create(&other, err) == MOELORA_OK);
    CHECK(other != queue);
    moelora_queue_destroy(other);
  }
  CHECK(moelora_queue_wake(queue, err) == MOELORA_E_HANDLE);
  moelora_engine_release(reinterpret_cast<moelora_engine*>(stack));
  moelora_engine_release(nullptr);
  moelora_engine_retain(nullptr);
}

TEST_CASE("a model that cannot be opened") {
  Config config;
  Err err;
  moelora_engine* engine = nullptr;
  CHECK(moelora_engine_create(config.config, "/no/such/model", MOELORA_STRLEN, &engine, err) == MOELORA_E_IO);
  CHECK(err.names("/no/such/model"));
  CHECK(engine == nullptr);
  CHECK(moelora_engine_create(config.config, "", 0, &engine, err) == MOELORA_E_INVALID);
  CHECK(moelora_engine_create(config.config, "a\0b", 3, &engine, err) == MOELORA_E_INVALID);
  REQUIRE(config.set("device", "cuda:7", err) == MOELORA_OK);  // of the eighth GPU, if this machine has any
  const std::string dir = moelora_host::model_dir();
  CHECK(moelora_engine_create(config.config, dir.data(), dir.size(), &engine, err) == MOELORA_E_NO_DEVICE);
  CHECK(err.names("cuda"));
  double fraction = -1;
  CHECK(moelora_engine_progress(config.config, &fraction, err) == MOELORA_OK);
  CHECK(fraction < 1.0);
  CHECK(moelora_engine_abort_load(config.config, err) == MOELORA_ALREADY_DONE);
}

TEST_CASE("the log: callback, reentrancy, ring") {
  struct Seen {
    moelora_config* config;
    moelora_status inside = 99;
    std::string text;
    int32_t level = 0;
  } seen{nullptr, 99, "", 0};
  Config config;
  seen.config = config.config;
  const auto fn = [](void* user, int32_t level, const char* text) {
    auto* to = static_cast<Seen*>(user);
    to->text = text;
    to->level = level;
    to->inside = moelora_config_set_int(to->config, "num_threads", MOELORA_STRLEN, 1, nullptr);
    moelora_config_destroy(to->config);  // ignored
  };
  Err err;
  CHECK(moelora_log_set(9, fn, &seen, err) == MOELORA_E_INVALID);
  REQUIRE(moelora_log_set(MOELORA_LOG_INFO, fn, &seen, err) == MOELORA_OK);
  {
    const moelora_host::Host host;
  }
  CHECK(seen.text.find("opened") != std::string::npos);
  CHECK(seen.level == MOELORA_LOG_INFO);
  CHECK(seen.inside == MOELORA_E_REENTRANT);
  CHECK(moelora_config_set_int(config.config, "num_threads", MOELORA_STRLEN, 1, err) == MOELORA_OK);
  REQUIRE(moelora_log_set(MOELORA_LOG_INFO, nullptr, nullptr, err) == MOELORA_OK);
  seen.text.clear();
  {
    const moelora_host::Host host;
  }
  CHECK(seen.text.empty());

  char buffer[4096];
  size_t n = 0;
  int32_t level = 0;
  CHECK(moelora_log_read(0, buffer, 3, &n, &level, err) == MOELORA_MORE);
  CHECK(n > 3);
  const size_t needed = n;
  CHECK(moelora_log_read(0, buffer, sizeof buffer, &n, &level, err) == MOELORA_OK);
  CHECK(n == needed);
  CHECK(level == MOELORA_LOG_INFO);
  std::string all(buffer, n);
  while (moelora_log_read(0, buffer, sizeof buffer, &n, &level, err) == MOELORA_OK) {
    all.append(buffer, n);
  }
  CHECK(all.find("page pool") != std::string::npos);
  CHECK(all.find("opened") != std::string::npos);
  CHECK(moelora_log_read(10, buffer, sizeof buffer, &n, &level, err) == MOELORA_TIMEOUT);
  REQUIRE(moelora_log_set(MOELORA_LOG_WARNING, nullptr, nullptr, err) == MOELORA_OK);
}

TEST_CASE("the message belongs to the call, not to the thread or the library") {
  constexpr int kThreads = 16;
  constexpr int kCalls = 2000;
  std::vector<int> wrong(kThreads, 0);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&wrong, t] {
      moelora_config* config = nullptr;
      if (moelora_config_create(MOELORA_ABI_VERSION, &config, nullptr) != MOELORA_OK) {
        wrong[static_cast<size_t>(t)] = kCalls;
        return;
      }
      Err err;
      for (int i = 0; i < kCalls; ++i) {
        const std::string key = "key_" + std::to_string(t) + "_" + std::to_string(i);
        const moelora_status status = moelora_config_set_int(config, key.data(), key.size(), 1, err);
        if (i % 16 == 0) {
          std::this_thread::yield();
        }
        if (status != MOELORA_E_INVALID || !err.names("\"" + key + "\"")) {
          ++wrong[static_cast<size_t>(t)];
        }
      }
      moelora_config_destroy(config);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const int count : wrong) {
    CHECK(count == 0);
  }
}

TEST_CASE("memory plan from config.json alone") {
  Config config;
  Err err;
  REQUIRE(config.set("device_memory_bytes", std::to_string(64 << 20), err) == MOELORA_OK);
  REQUIRE(config.set("max_num_sequences", "4", err) == MOELORA_OK);
  const std::string dir = moelora_host::model_dir();
  moelora_memory_plan plan;
  moelora_memory_plan_init(&plan);
  REQUIRE(moelora_plan_memory(config.config, dir.data(), dir.size(), 10, 16, &plan, err) == MOELORA_OK);
  // By hand from config.json, bf16: embedding and head 320 x 64; in each of 2 layers q 64 x 64, k and v 32 x 64,
  // o 64 x 64, 2 norms of 64, q and k norm of 16, router 8 x 64, 8 experts of 3 x 48 x 64; final norm 64.
  const uint64_t layer = 64 * 64 * 2 + 32 * 64 * 2 + 2 * 64 + 2 * 16 + 8 * 64 + 8 * 3 * 48 * 64;
  CHECK(plan.weight_bytes == 2 * (2 * 320 * 64 + 2 * layer + 64));
  // K and V, 2 layers, 2 heads of 16, fp32; a page may hold padding, so at least this.
  CHECK(plan.kv_bytes_per_token >= 2 * 2 * 2 * 16 * 4);
  CHECK(plan.max_context_tokens == 512);
  CHECK(plan.kv_bytes_full_context == 512 * plan.kv_bytes_per_token);
  CHECK(plan.pool_bytes <= uint64_t{64} << 20);
  CHECK(plan.pool_bytes > uint64_t{60} << 20);
  CHECK(plan.lora_rank == 16);
  CHECK(plan.adapters_bytes == 10 * plan.adapter_bytes);
  CHECK(plan.total_bytes == plan.weight_bytes + plan.workspace_bytes + plan.pool_bytes);
  CHECK(plan.adapters_fit > 10);
  CHECK(plan.fits == 1);
  // The smallest that could hold A and B of every module at rank 16 in bf16.
  const uint64_t values = 2 * 16 * ((64 + 64) * 2 + (32 + 64) * 2 + 8 * 3 * (48 + 64));
  CHECK(plan.adapter_bytes >= 2 * values);
  CHECK(plan.adapter_bytes <= 6 * values);

  CHECK(moelora_plan_memory(config.config, dir.data(), dir.size(), 1000000, 16, &plan, err) == MOELORA_OK);
  CHECK(plan.fits == 0);
  CHECK(plan.kv_tokens_with_adapters == 0);
  CHECK(moelora_plan_memory(config.config, dir.data(), dir.size(), -1, 16, &plan, err) == MOELORA_E_INVALID);
  CHECK(moelora_plan_memory(config.config, dir.data(), dir.size(), 1, 9999, &plan, err) == MOELORA_E_INVALID);
  CHECK(moelora_plan_memory(config.config, "/no/such", MOELORA_STRLEN, 1, 16, &plan, err) == MOELORA_E_IO);
}
