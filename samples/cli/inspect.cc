// SPDX-License-Identifier: Apache-2.0
// moelora inspect: what a folder is (model or adapter), how large, and whether the library takes it; a refusal is
// printed as the library words it, and the exit code is 1.
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "samples/cli/command.h"
#include "samples/cli/reference_case.h"

namespace moelora_cli {
namespace {

namespace fs = std::filesystem;

struct InspectFlags {
  EngineFlags engine;
  std::string dir;
  int32_t num_adapters = 8;
  int32_t rank = 16;
  bool plan_only = false;
};

void line(const char* name, const std::string& value) {
  std::printf("  %-26s %s\n", name, value.c_str());
}

std::string bytes(uint64_t count) {
  char text[64];
  if (count >= 10'000'000'000) {
    std::snprintf(text, sizeof(text), "%.1f GB", static_cast<double>(count) / 1e9);
  } else {
    std::snprintf(text, sizeof(text), "%.1f MB", static_cast<double>(count) / 1e6);
  }
  return text;
}

nlohmann::json read_json(const std::string& path) {
  nlohmann::json value = nlohmann::json::parse(read_file(path), nullptr, false);
  if (!value.is_object()) {
    throw Failure(MOELORA_E_CORRUPT, path + ": not a JSON object");
  }
  return value;
}

// Tensors of all safetensors files of a folder by stored dtype.
void print_tensors(const std::string& dir) {
  std::map<std::string, std::pair<size_t, uint64_t>> by_dtype;
  for (const auto& entry : fs::directory_iterator(dir)) {
    if (entry.path().extension() == ".safetensors") {
      const TensorFile file = read_tensor_header(entry.path().string());
      for (const auto& [name, tensor] : file.tensors) {
        ++by_dtype[tensor.dtype].first;
        by_dtype[tensor.dtype].second += tensor.end - tensor.begin;
      }
    }
  }
  for (const auto& [dtype, count] : by_dtype) {
    line(("tensors " + dtype).c_str(), std::to_string(count.first) + ", " + bytes(count.second));
  }
}

void print_plan(const InspectFlags& flags, const moelora_config* config) {
  moelora_memory_plan plan;
  moelora_memory_plan_init(&plan);
  must(moelora_plan_memory, config, flags.dir.data(), flags.dir.size(), flags.num_adapters, flags.rank, &plan);
  line("weights", bytes(plan.weight_bytes));
  line("workspace", bytes(plan.workspace_bytes));
  line("pool (KV and adapters)", bytes(plan.pool_bytes));
  line("KV a token", std::to_string(plan.kv_bytes_per_token) + " bytes");
  line("context", std::to_string(plan.max_context_tokens) + " tokens, " + bytes(plan.kv_bytes_full_context));
  line(("adapter of rank " + std::to_string(plan.lora_rank)).c_str(),
       bytes(plan.adapter_bytes) + "; " + std::to_string(plan.adapters_fit) + " fit beside one full context");
  line("total, available", bytes(plan.total_bytes) + ", " + bytes(plan.available_bytes));
  line("fits", plan.fits != 0 ? "yes" : "no");
}

void print_engine(const moelora_engine_info& info) {
  line("layers", std::to_string(info.num_layers));
  line("hidden, vocabulary", std::to_string(info.hidden_size) + ", " + std::to_string(info.vocab_size));
  line("heads, KV heads, size", std::to_string(info.num_heads) + ", " + std::to_string(info.num_kv_heads) + ", " +
                                    std::to_string(info.head_dim));
  line("intermediate", std::to_string(info.intermediate_size));
  line("experts", info.num_experts == 0
                      ? "none (dense)"
                      : std::to_string(info.num_experts) + ", " + std::to_string(info.num_experts_active) + " a token");
  line("device", std::string(info.device_name) + ", " + std::to_string(info.num_threads) + " threads");
}

int inspect_model(const InspectFlags& flags) {
  const auto config_json = read_json(flags.dir + "/config.json");
  std::printf("%s: model\n", flags.dir.c_str());
  line("architecture", config_json.contains("architectures") ? config_json["architectures"].dump() : "not named");
  print_tensors(flags.dir);
  EngineFlags engine_flags = flags.engine;
  engine_flags.model = flags.dir;
  try {
    const ConfigPtr config = make_config(engine_flags);
    print_plan(flags, config.get());
    if (!flags.plan_only) {
      const Engine engine(config.get(), flags.dir);
      print_engine(engine.info());
    }
  } catch (const Failure& failure) {
    line("refused", failure.what());
    return 1;
  }
  line("refused", flags.plan_only ? "nothing in config.json (weights not opened)" : "nothing");
  return 0;
}

std::string target_names(uint32_t targets) {
  static const std::pair<uint32_t, const char*> kNames[] = {{MOELORA_TARGET_Q, "q"},
                                                            {MOELORA_TARGET_K, "k"},
                                                            {MOELORA_TARGET_V, "v"},
                                                            {MOELORA_TARGET_O, "o"},
                                                            {MOELORA_TARGET_ROUTER, "router"},
                                                            {MOELORA_TARGET_GATE, "gate"},
                                                            {MOELORA_TARGET_UP, "up"},
                                                            {MOELORA_TARGET_DOWN, "down"},
                                                            {MOELORA_TARGET_SHARED_GATE, "shared gate"},
                                                            {MOELORA_TARGET_SHARED_UP, "shared up"},
                                                            {MOELORA_TARGET_SHARED_DOWN, "shared down"},
                                                            {MOELORA_TARGET_SHARED_EXPERT_GATE, "shared expert's gate"},
                                                            {MOELORA_TARGET_EXPERT_GATE, "experts' gate"},
                                                            {MOELORA_TARGET_EXPERT_UP, "experts' up"},
                                                            {MOELORA_TARGET_EXPERT_DOWN, "experts' down"}};
  std::string text;
  for (const auto& [bit, name] : kNames) {
    if ((targets & bit) != 0) {
      text += (text.empty() ? "" : ", ") + std::string(name);
    }
  }
  return text;
}

void print_adapter_config(const nlohmann::json& config) {
  for (const char* key : {"peft_type", "base_model_name_or_path", "r", "lora_alpha", "target_modules",
                          "target_parameters", "modules_to_save", "use_rslora", "use_dora", "lora_bias", "rank_pattern",
                          "alpha_pattern", "layers_to_transform"}) {
    const auto found = config.find(key);
    if (found != config.end() && !found->is_null() && *found != false && !(found->is_structured() && found->empty())) {
      line(key, found->dump());
    }
  }
}

int inspect_adapter(const InspectFlags& flags) {
  std::printf("%s: adapter\n", flags.dir.c_str());
  print_adapter_config(read_json(flags.dir + "/adapter_config.json"));
  print_tensors(flags.dir);
  if (flags.engine.model.empty()) {
    line("refused", "unknown without --model DIR");
    return 0;
  }
  const Engine engine(flags.engine);
  try {
    const moelora_adapter adapter = engine.load(parse_adapter("adapter=" + flags.dir));
    moelora_adapter_info info;
    moelora_adapter_info_init(&info);
    must(moelora_adapter_info_get, engine.get(), adapter, &info);
    line("adapts", target_names(info.targets));
    line("rank, largest rank", std::to_string(info.rank) + ", " + std::to_string(info.max_rank));
    line("layers, experts", std::to_string(info.num_layers) + ", " + std::to_string(info.num_experts));
    line("tensors used", std::to_string(info.tensors_matched));
    line("host memory", bytes(info.host_bytes));
  } catch (const Failure& failure) {
    line("refused", failure.what());
    return 1;
  }
  line("refused", "nothing");
  return 0;
}

int inspect(const InspectFlags& flags) {
  if (fs::exists(flags.dir + "/adapter_config.json")) {
    return inspect_adapter(flags);
  }
  if (fs::exists(flags.dir + "/config.json")) {
    return inspect_model(flags);
  }
  throw Failure(MOELORA_E_NOT_FOUND, flags.dir + " has neither config.json nor adapter_config.json");
}

}  // namespace

void add_inspect(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<InspectFlags>();
  CLI::App* command = app.add_subcommand("inspect", "Says what a model or adapter folder is and what would be refused");
  add_engine_flags(*command, flags->engine, false);
  command->add_option("dir", flags->dir, "model or adapter folder")->required()->check(CLI::ExistingDirectory);
  command->add_option("--adapters", flags->num_adapters, "adapters that the memory plan is made for")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--rank", flags->rank, "their rank")->check(CLI::PositiveNumber);
  command->add_flag("--plan-only", flags->plan_only, "do not open the weights");
  command->callback([flags, exit_code] { *exit_code = inspect(*flags); });
}

}  // namespace moelora_cli
