// SPDX-License-Identifier: Apache-2.0
// adapter_config.json of PEFT: what decides scale, rank and kind of an adapter. Keys that change the maths and are not
// implemented are refused here by name and value; bookkeeping keys are ignored. Which modules are adapted is
// decided by the tensors, never by this file.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/adapter/adapter_image.h"

namespace moelora {

// rank_pattern or alpha_pattern: keys are regular expressions on module paths, in file order; the first that matches
// wins. Python's `re` and PCRE2 agree on everything seen in such keys.
class PatternTable {
 public:
  PatternTable();
  ~PatternTable();
  PatternTable(PatternTable&&) noexcept;
  PatternTable& operator=(PatternTable&&) noexcept;

  // Throws Error{kCorrupt} naming source and key when `key` is not a regular expression.
  void add(const std::string& key, double value, const std::string& source);
  // The value of the first key that matches any of the spellings of one module's path; null if none does.
  [[nodiscard]] const double* find(const std::vector<std::string>& paths) const;
  [[nodiscard]] bool empty() const { return entries_.empty(); }

 private:
  struct Entry;
  std::vector<Entry> entries_;
};

// PEFT's version as numbers; major -1 = absent, -2 = not understood.
struct PeftVersion {
  int32_t major = -1;
  int32_t minor = 0;
  int32_t patch = 0;
  bool dev = false;  // a development version: older than the release of that number
};

struct AdapterConfig {
  int32_t rank = 0;
  double alpha = 0.0;
  bool use_rslora = false;
  bool lora_bias = false;
  bool unsloth_origin = false;  // auto_mapping.unsloth_fixed
  PatternTable rank_pattern;
  PatternTable alpha_pattern;
  std::vector<std::string> target_modules;  // list form only
  std::string target_regex;                 // string form, except "all-linear"
  std::vector<std::string> target_parameters;
  std::vector<std::string> modules_to_save;  // refused by the loader, which can name the tensors
  std::string peft_version_text;
  PeftVersion peft_version;
  ExpertBLayout b_layout = ExpertBLayout::kAuto;  // lora_B_layout
  std::vector<std::string> warnings;
};

struct ModuleScale {
  int32_t rank = 0;
  float scale = 0.0f;
};

// `source` names the file in messages. Throws Error: kCorrupt (not JSON, wrong type), kUnsupported (key, value, what to
// do), kAdapterMismatch (r or alpha out of range).
AdapterConfig parse_adapter_config(const std::string& json, const std::string& source);

// Rank and scale that the config gives to a module. `paths` are spellings of one path.
ModuleScale module_scale(const AdapterConfig& config, const std::vector<std::string>& paths);

// True if `path` is the entry or ends in "." + entry.
bool path_has_suffix(const std::string& path, const std::string& entry);

}  // namespace moelora
