// SPDX-License-Identifier: Apache-2.0
#include "runtime/engine/options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>
#include <variant>

#include <fmt/format.h>

#define TOML_MAX_NESTED_VALUES 64
#include <toml++/toml.h>

namespace moelora {
namespace {

constexpr size_t kTomlBytesMax = size_t{1} << 20;
constexpr int kTomlDepthMax = 64;
constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

using Field = std::variant<std::string EngineOptions::*, int64_t EngineOptions::*, double EngineOptions::*,
                           bool EngineOptions::*, Compute EngineOptions::*>;
struct Row {
  OptionKey key;
  Field field;
  double min = 0;
  double max = 0;
  std::vector<std::string> choices = {};
};

// Who runs when, and who gives way.
std::vector<Row> scheduler_rows() {
  using O = EngineOptions;
  using enum OptionType;
  // clang-format off
  return {
      {{"max_overtaking_steps", kInt, "256",
        "Steps in which requests behind may start before one that lacks an adapter slot or pages."},
       &O::max_overtaking_steps, 0, static_cast<double>(kInt32Max)},
      {{"fairness", kString, "arrival",
        "Among requests of one priority: first come first served, or by adapter, the one that was given least first."},
       &O::fairness, 0, 0, {"arrival", "adapter"}},
      {{"early_refusal", kBool, "false",
        "Waiting requests that cannot end before their deadline, at the rates measured, end at once."},
       &O::early_refusal},
      {{"swap_memory_bytes", kInt, "0",
        "Host memory for the KV of preempted requests, where copying is cheaper than computing again; 0 = never."},
       &O::swap_memory_bytes, 0, static_cast<double>(kNoLimit)},
      {{"max_loads_per_step", kInt, "32", "Copies of adapters to the device that a step may begin."},
       &O::max_loads_per_step, 1, 65536},
  };
  // clang-format on
}

// What the host sees of an engine's work.
std::vector<Row> observation_rows() {
  using O = EngineOptions;
  using enum OptionType;
  constexpr auto kMax32 = static_cast<double>(kInt32Max);
  // clang-format off
  return {
      {{"timeline_events", kInt, "0",
        "Newest steps, uploads and requests that are kept for moelora_timeline_write; 0 = none."},
       &O::timeline_events, 0, 16777216},
      {{"metrics_adapters", kInt, "256",
        "Adapters with series of their own in moelora_metrics_text, those with the most requests; 0 = none."},
       &O::metrics_adapters, 0, kMax32},
      {{"audit", kInt, "0", "Self-checks: 0 off, 1 at load and close, 2 every step."}, &O::audit, 0, 2},
  };
  // clang-format on
}

std::vector<Row>* joined(std::vector<Row>* rows, const std::vector<std::vector<Row>>& more) {
  for (const std::vector<Row>& part : more) {
    rows->insert(rows->end(), part.begin(), part.end());
  }
  return rows;
}

// Never destroyed: a host may exit while another thread still asks.
const std::vector<Row>& rows() {
  using O = EngineOptions;
  using enum OptionType;
  constexpr auto kMax32 = static_cast<double>(kInt32Max);
  constexpr auto kMax64 = static_cast<double>(kNoLimit);
  // clang-format off
  static const std::vector<Row>& table = *joined(new std::vector<Row>{
      {{"device", kString, "cpu", "Where the model runs: cpu, cuda (the first GPU) or cuda:N."}, &O::device, 0, 0,
       {"cpu", "cuda", "cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4", "cuda:5", "cuda:6", "cuda:7"}},
      {{"num_threads", kInt, "0", "CPU workers; 0 = one for each core that the process may use."},
       &O::num_threads, 0, 4096},
      {{"compute", kString, "exact", "Activations of matrix products: exact (fp32) or bf16."},
       &O::compute, 0, 0, {"exact", "bf16"}},
      {{"kv_dtype", kString, "auto", "Element type of kept keys and values; auto = the backend's own."},
       &O::kv_dtype, 0, 0, {"auto", "f32", "bf16"}},
      {{"deterministic", kBool, "false", "A row's result does not depend on its neighbours in the batch."},
       &O::deterministic},
      {{"random_weights", kBool, "false", "Random weights from config.json alone, for benchmarks."},
       &O::random_weights},
      {{"seed", kInt, "0", "Of random weights."}, &O::seed, 0, kMax64},
      {{"random_routing", kString, "random",
        "Routers of random weights: random (as they come), zipf, or one (all rows to the same experts)."},
       &O::random_routing, 0, 0, {"random", "zipf", "one"}},
      {{"random_routing_exponent", kNumber, "1", "Of random_routing = zipf."}, &O::random_routing_exponent, 0.0, 8.0},
      {{"device_memory_bytes", kInt, "0", "Page pool of KV and adapters; 0 = device_memory_fraction decides."},
       &O::device_memory_bytes, 0, kMax64},
      {{"device_memory_fraction", kNumber, "0",
        "Page pool, as a fraction of the memory free at creation; 0 = 0.25 on the CPU, 0.9 on a GPU."},
       &O::device_memory_fraction, 0.0, 1.0},
      {{"host_memory_bytes", kInt, "0",
        "Host copies of adapters; those of folders are dropped and read again as needed. 0 = no bound."},
       &O::host_memory_bytes, 0, kMax64},
      {{"max_adapters_resident", kInt, "0",
        "Adapters on the device at once; 0 = max_num_sequences + prefetch_requests, at least 64."},
       &O::max_adapters_resident, 0, 65536},
      {{"upload_bytes_per_second", kInt, "0",
        "Bound on the rate at which adapters are read again and copied to the device, beside the steps; 0 = none."},
       &O::upload_bytes_per_second, 0, kMax64},
      {{"max_lora_rank", kInt, "256", "Adapters of a larger rank are refused."}, &O::max_lora_rank, 1, 4096},
      {{"kv_block_tokens", kInt, "16", "Tokens in a block of KV."}, &O::kv_block_tokens, 1, 256},
      {{"prefix_cache", kBool, "true", "Full KV blocks stay cached and serve other prompts that begin alike."},
       &O::prefix_cache},
      {{"max_num_sequences", kInt, "64", "Requests running at once."}, &O::max_num_sequences, 1, 65536},
      {{"max_batch_tokens", kInt, "0",
        "Rows of a step; longer prompts are computed in chunks. 0 = 512 on the CPU, 4096 on a GPU."},
       &O::max_batch_tokens, 0, 1048576},
      {{"max_queued_requests", kInt, "1024", "Waiting requests; more are refused with E_OVERLOADED."},
       &O::max_queued_requests, 1, 1048576},
      {{"prefetch_requests", kInt, "16",
        "Waiting requests whose adapters are brought to the device ahead of their turn; 0 = none."},
       &O::prefetch_requests, 0, 65536},
      {{"max_context_tokens", kInt, "0", "Prompt and output of a sequence; 0 = the model's."},
       &O::max_context_tokens, 0, kMax32},
      {{"output_buffer_tokens", kInt, "4096", "Unread tokens that a request holds before `overrun` applies."},
       &O::output_buffer_tokens, 1, kMax32},
      {{"overrun", kString, "pause", "A request that nobody reads: pause it, or fail it with E_OVERRUN."},
       &O::overrun, 0, 0, {"pause", "fail"}},
      {{"expert_orientation", kString, "auto", "3-D expert adapters whose files leave open which side is the input."},
       &O::expert_orientation, 0, 0, {"auto", "natural", "reversed"}},
      {{"expert_b_layout", kString, "auto", "Column order of B in 3-D expert adapters without a marker."},
       &O::expert_b_layout, 0, 0, {"auto", "rank_major", "grouped_by_expert"}},
      {{"kernels", kString, "auto", "CPU: auto, or reference (plain loops, slow)."},
       &O::kernels, 0, 0, {"auto", "reference"}},
      {{"graphs", kBool, "true", "GPU: decode steps are recorded once at open and launched as graphs."}, &O::graphs},
  }, {scheduler_rows(), observation_rows()});
  // clang-format on
  return table;
}

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) {
    row[j] = j;
  }
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = std::exchange(row[j], std::min({replaced, row[j] + 1, row[j - 1] + 1}));
    }
  }
  return row[b.size()];
}

std::string near_matches(std::string_view key) {
  std::vector<std::pair<size_t, std::string_view>> close;
  for (const Row& row : rows()) {
    const std::string_view name = row.key.name;
    const size_t distance = edit_distance(key, name);
    const bool part = key.size() >= 4 && name.find(key) != std::string_view::npos;
    if (distance <= std::max<size_t>(2, name.size() / 3) || part) {
      close.emplace_back(part ? 0 : distance, name);
    }
  }
  std::stable_sort(close.begin(), close.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::string text;
  for (size_t i = 0; i < std::min<size_t>(close.size(), 3); ++i) {
    text += fmt::format("{}{}", i == 0 ? "; near: " : ", ", close[i].second);
  }
  return text;
}

// Keys and values of strangers are shown shortened.
std::string shown(std::string_view text) {
  return text.size() <= 64 ? std::string(text) : std::string(text.substr(0, 61)) + "...";
}

const Row& find_row(const std::string& key) {
  const auto found = std::find_if(rows().begin(), rows().end(), [&](const Row& row) { return key == row.key.name; });
  if (found != rows().end()) {
    return *found;
  }
  const std::string near = key.size() <= 128 ? near_matches(key) : std::string();
  throw Error(Status::kInvalid, fmt::format("unknown option \"{}\"{}", shown(key), near));
}

[[noreturn]] void fail_value(const Row& row, const std::string& value) {
  std::string range;
  switch (row.key.type) {
    case OptionType::kString:
      range = fmt::format("one of {}", fmt::join(row.choices, ", "));
      break;
    case OptionType::kInt:
      range = fmt::format("an integer of {} to {}", static_cast<int64_t>(row.min),
                          row.max >= static_cast<double>(kNoLimit) ? kNoLimit : static_cast<int64_t>(row.max));
      break;
    case OptionType::kNumber:
      range = fmt::format("a number of {} to {}", row.min, row.max);
      break;
    case OptionType::kBool:
      range = "true or false";
      break;
  }
  throw Error(Status::kInvalid, fmt::format("option {} takes {}, not {}", row.key.name, range, shown(value)));
}

template <class T>
std::optional<T> parse_number(const std::string& text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    return std::nullopt;
  }
  return value;
}

void set_row(EngineOptions& options, const Row& row, int64_t value) {
  if (const auto* field = std::get_if<int64_t EngineOptions::*>(&row.field)) {
    const int64_t max = row.max >= static_cast<double>(kNoLimit) ? kNoLimit : static_cast<int64_t>(row.max);
    if (value < static_cast<int64_t>(row.min) || value > max) {
      fail_value(row, std::to_string(value));
    }
    options.** field = value;
  } else if (const auto* flag = std::get_if<bool EngineOptions::*>(&row.field); flag && (value == 0 || value == 1)) {
    options.** flag = value == 1;
  } else if (std::holds_alternative<double EngineOptions::*>(row.field)) {
    set_option(options, row.key.name, static_cast<double>(value));
  } else {
    fail_value(row, std::to_string(value));
  }
}

}  // namespace

const std::vector<OptionKey>& option_keys() {
  static const std::vector<OptionKey>& keys = *[] {
    auto* list = new std::vector<OptionKey>;  // never destroyed, as rows()
    for (const Row& row : rows()) {
      list->push_back(row.key);
    }
    return list;
  }();
  return keys;
}

void set_option(EngineOptions& options, const std::string& key, int64_t value) {
  set_row(options, find_row(key), value);
}

void set_option(EngineOptions& options, const std::string& key, double value) {
  const Row& row = find_row(key);
  if (const auto* field = std::get_if<double EngineOptions::*>(&row.field)) {
    if (!(value >= row.min && value <= row.max)) {
      fail_value(row, fmt::format("{}", value));
    }
    options.** field = value;
    return;
  }
  // 2^53: beyond it a double does not name one integer.
  if (std::holds_alternative<int64_t EngineOptions::*>(row.field) && std::floor(value) == value &&
      std::fabs(value) <= 9007199254740992.0) {
    return set_row(options, row, static_cast<int64_t>(value));
  }
  fail_value(row, fmt::format("{}", value));
}

void set_option(EngineOptions& options, const std::string& key, const std::string& value) {
  const Row& row = find_row(key);
  switch (row.key.type) {
    case OptionType::kString:
      if (std::find(row.choices.begin(), row.choices.end(), value) == row.choices.end()) {
        fail_value(row, value);
      }
      if (const auto* compute = std::get_if<Compute EngineOptions::*>(&row.field)) {
        options.** compute = value == "bf16" ? Compute::kBf16 : Compute::kExact;
      } else {
        options.*std::get<std::string EngineOptions::*>(row.field) = value;
      }
      return;
    case OptionType::kInt:
      if (const auto number = parse_number<int64_t>(value)) {
        return set_row(options, row, *number);
      }
      break;
    case OptionType::kNumber:
      if (const auto number = parse_number<double>(value)) {
        return set_option(options, key, *number);
      }
      break;
    case OptionType::kBool:
      if (value == "true" || value == "1") {
        return set_row(options, row, 1);
      }
      if (value == "false" || value == "0") {
        return set_row(options, row, 0);
      }
      break;
  }
  fail_value(row, value);
}

namespace {

// toml++ bounds nested values but not dotted keys, whose tables are destroyed recursively.
void check_toml_limits(const std::string& text, const std::string& source) {
  if (text.size() > kTomlBytesMax) {
    throw Error(Status::kInvalid, fmt::format("{}: {} bytes; at most {} are read", source, text.size(), kTomlBytesMax));
  }
  int line = 1;
  int depth = 0;
  for (const char c : text) {
    if (c == '\n') {
      ++line;
      depth = 0;
    } else if ((c == '.' || c == '[' || c == '{') && ++depth > kTomlDepthMax) {
      throw Error(Status::kCorrupt, fmt::format("{}:{}: nested deeper than {}", source, line, kTomlDepthMax));
    }
  }
}

void set_from_toml(EngineOptions& options, const std::string& key, const toml::node& value) {
  if (const auto* text = value.as_string()) {
    set_option(options, key, text->get());
  } else if (const auto* integer = value.as_integer()) {
    set_option(options, key, integer->get());
  } else if (const auto* number = value.as_floating_point()) {
    set_option(options, key, number->get());
  } else if (const auto* flag = value.as_boolean()) {
    const Row& row = find_row(key);
    if (row.key.type != OptionType::kBool) {
      fail_value(row, flag->get() ? "true" : "false");
    }
    set_row(options, row, flag->get() ? 1 : 0);
  } else {
    fail_value(find_row(key), "a table, array or date");
  }
}

}  // namespace

void load_options_toml(EngineOptions& options, const std::string& text, const std::string& source) {
  check_toml_limits(text, source);
  EngineOptions changed = options;  // all or nothing
  try {
    const toml::table table = toml::parse(text, source);
    for (const auto& [key, value] : table) {
      try {
        set_from_toml(changed, std::string(key.str()), value);
      } catch (const Error& error) {
        throw Error(error.status(), fmt::format("{}:{}: {}", source, key.source().begin.line, error.what()));
      }
    }
  } catch (const toml::parse_error& error) {
    throw Error(Status::kCorrupt, fmt::format("{}:{}: {}", source, error.source().begin.line, error.description()));
  }
  options = std::move(changed);
}

}  // namespace moelora
