// SPDX-License-Identifier: Apache-2.0
// moelora.h, group "configuration": the builder over runtime/engine/options.h, and plan_memory.
#include <sstream>

#include "runtime/api/boundary.h"
#include "runtime/api/handles.h"
#include "runtime/engine/memory_plan.h"
#include "runtime/io/json.h"

using namespace moelora;
using namespace moelora::api;

namespace {

constexpr size_t kOptionBytesMax = 4096;
constexpr size_t kTomlBytesMax = size_t{1} << 20;

template <class Value>
moelora_status set_one(moelora_config* config, const char* key, size_t key_len, const Value& value,
                       moelora_error* err) {
  return guard(err, [&] {
    const auto object = find_config(config);
    const std::string name = text_argument("key", key, key_len, kOptionBytesMax);
    const std::lock_guard<std::mutex> lock(object->mutex);
    set_option(object->options, name, value);
    return Status::kOk;
  });
}

}  // namespace

moelora_status moelora_config_create(uint32_t abi_version, moelora_config** out, moelora_error* err) {
  return guard(err, [&] {
    required(out, "out");
    if (abi_version != MOELORA_ABI_VERSION) {
      throw Error(Status::kAbi, fmt::format("the program was built for ABI {}; this library, version {}, has ABI {}",
                                            abi_version, moelora_version_string(), MOELORA_ABI_VERSION));
    }
    *out = add_config(std::make_shared<ConfigObject>());
    return Status::kOk;
  });
}

void moelora_config_destroy(moelora_config* config) {
  guard(nullptr, [&] {
    remove_config(config);
    return Status::kOk;
  });
}

moelora_status moelora_config_set_str(moelora_config* config, const char* key, size_t key_len, const char* value,
                                      size_t value_len, moelora_error* err) {
  std::string text;
  const moelora_status status = guard(err, [&] {
    text = text_argument("value", value, value_len, kOptionBytesMax);
    return Status::kOk;
  });
  return status < 0 ? status : set_one(config, key, key_len, text, err);
}

moelora_status moelora_config_set_int(moelora_config* config, const char* key, size_t key_len, int64_t value,
                                      moelora_error* err) {
  return set_one(config, key, key_len, value, err);
}

moelora_status moelora_config_set_num(moelora_config* config, const char* key, size_t key_len, double value,
                                      moelora_error* err) {
  return set_one(config, key, key_len, value, err);
}

moelora_status moelora_config_load_toml(moelora_config* config, const char* path, size_t path_len, moelora_error* err) {
  return guard(err, [&] {
    const auto object = find_config(config);
    const std::string file = path_argument("path", path, path_len);
    const std::lock_guard<std::mutex> lock(object->mutex);
    load_options_toml(object->options, read_text(file, kTomlBytesMax), file);
    return Status::kOk;
  });
}

moelora_status moelora_config_load_toml_mem(moelora_config* config, const char* text, size_t text_len,
                                            moelora_error* err) {
  return guard(err, [&] {
    const auto object = find_config(config);
    const std::string copy = text_argument("text", text, text_len, kTomlBytesMax);
    const std::lock_guard<std::mutex> lock(object->mutex);
    load_options_toml(object->options, copy, "<memory>");
    return Status::kOk;
  });
}

size_t moelora_config_key_count(void) {
  size_t count = 0;
  guard(nullptr, [&] {
    count = option_keys().size();
    return Status::kOk;
  });
  return count;
}

moelora_status moelora_config_key_at(size_t index, const char** name, int32_t* type, const char** default_text,
                                     const char** help, moelora_error* err) {
  return guard(err, [&] {
    if (index >= option_keys().size()) {
      throw Error(Status::kNotFound, fmt::format("key {} of {}", index, option_keys().size()));
    }
    static_assert(static_cast<int>(OptionType::kBool) == MOELORA_TYPE_BOOL &&
                  static_cast<int>(OptionType::kString) == MOELORA_TYPE_STRING);
    const OptionKey& key = option_keys()[index];
    if (name != nullptr) {
      *name = key.name;
    }
    if (type != nullptr) {
      *type = static_cast<int32_t>(key.type);
    }
    if (default_text != nullptr) {
      *default_text = key.default_text;
    }
    if (help != nullptr) {
      *help = key.help;
    }
    return Status::kOk;
  });
}

moelora_status moelora_plan_memory(const moelora_config* config, const char* model_dir, size_t model_dir_len,
                                   int32_t num_adapters, int32_t lora_rank, moelora_memory_plan* plan,
                                   moelora_error* err) {
  return guard(err, [&] {
    check_struct(plan, "plan");
    const auto object = find_config(config);
    const std::string dir = path_argument("model_dir", model_dir, model_dir_len);
    EngineOptions options;
    {
      const std::lock_guard<std::mutex> lock(object->mutex);
      options = object->options;
    }
    if (num_adapters < 0) {
      throw Error(Status::kInvalid, fmt::format("num_adapters is {}", num_adapters));
    }
    if (lora_rank < 1 || lora_rank > options.max_lora_rank) {
      throw Error(Status::kInvalid, fmt::format("lora_rank is {}; option max_lora_rank allows 1 to {}", lora_rank,
                                                options.max_lora_rank));
    }
    const MemoryPlan found = plan_memory(options, load_model_config(dir), num_adapters, lora_rank);
    moelora_memory_plan result = {};
    result.fits = found.fits ? 1 : 0;
    result.weight_bytes = found.weight_bytes;
    result.workspace_bytes = found.workspace_bytes;
    result.pool_bytes = found.pool_bytes;
    result.kv_bytes_per_token = found.kv_bytes_per_token;
    result.kv_bytes_full_context = found.kv_bytes_full_context;
    result.adapter_bytes = found.adapter_bytes;
    result.adapters_bytes = found.adapter_bytes * static_cast<uint64_t>(num_adapters);
    result.total_bytes = found.weight_bytes + found.workspace_bytes + found.pool_bytes;
    result.available_bytes = found.available_bytes;
    result.kv_tokens_with_adapters = found.kv_tokens_with_adapters;
    result.adapters_fit = found.adapters_fit;
    result.max_context_tokens = found.max_context_tokens;
    result.lora_rank = lora_rank;
    write_struct(plan, result);
    return Status::kOk;
  });
}
