// SPDX-License-Identifier: Apache-2.0
// PatternTable over PCRE2. A key K matches a module path if ^(.*\.)?(K)$ does, so it starts at a segment's border and
// ends at the path's end. Match limits bound what a hostile expression can cost.
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <cmath>

#include "kernels/base/error.h"
#include "runtime/adapter/adapter_config.h"

namespace moelora {
namespace {

constexpr uint32_t kMatchLimit = 100000;
constexpr uint32_t kDepthLimit = 1000;
constexpr size_t kHeapLimitKib = 1024;

struct CodeFree {
  void operator()(pcre2_code* code) const { pcre2_code_free(code); }
};
struct MatchFree {
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};
struct ContextFree {
  void operator()(pcre2_match_context* context) const { pcre2_match_context_free(context); }
};

PCRE2_SPTR bytes_of(const std::string& text) {
  return reinterpret_cast<PCRE2_SPTR>(text.data());
}

}  // namespace

struct PatternTable::Entry {
  std::string key;
  std::string source;
  double value;
  std::unique_ptr<pcre2_code, CodeFree> code;
  std::unique_ptr<pcre2_match_data, MatchFree> match;
  std::unique_ptr<pcre2_match_context, ContextFree> context;
};

PatternTable::PatternTable() = default;
PatternTable::~PatternTable() = default;
PatternTable::PatternTable(PatternTable&&) noexcept = default;
PatternTable& PatternTable::operator=(PatternTable&&) noexcept = default;

void PatternTable::add(const std::string& key, double value, const std::string& source) {
  const std::string expression = "^(.*\\.)?(" + key + ")$";
  int fault = 0;
  PCRE2_SIZE offset = 0;
  Entry entry{key, source, value, nullptr, nullptr, nullptr};
  entry.code.reset(pcre2_compile(bytes_of(expression), expression.size(), PCRE2_UTF | PCRE2_UCP | PCRE2_DOLLAR_ENDONLY,
                                 &fault, &offset, nullptr));
  if (!entry.code) {
    PCRE2_UCHAR text[128] = {};
    pcre2_get_error_message(fault, text, sizeof text);
    throw Error{Status::kCorrupt,
                source + ": '" + key + "' is not a regular expression: " + reinterpret_cast<const char*>(text)};
  }
  entry.match.reset(pcre2_match_data_create_from_pattern(entry.code.get(), nullptr));
  entry.context.reset(pcre2_match_context_create(nullptr));
  if (!entry.match || !entry.context) {
    throw Error{Status::kNomem, source + ": no memory for the expression '" + key + "'"};
  }
  pcre2_set_match_limit(entry.context.get(), kMatchLimit);
  pcre2_set_depth_limit(entry.context.get(), kDepthLimit);
  pcre2_set_heap_limit(entry.context.get(), kHeapLimitKib);
  entries_.push_back(std::move(entry));
}

const double* PatternTable::find(const std::vector<std::string>& paths) const {
  for (const Entry& entry : entries_) {
    for (const std::string& path : paths) {
      const int result =
          pcre2_match(entry.code.get(), bytes_of(path), path.size(), 0, 0, entry.match.get(), entry.context.get());
      if (result >= 0) {
        return &entry.value;
      }
      if (result != PCRE2_ERROR_NOMATCH) {
        throw Error{Status::kUnsupported, entry.source + ": the expression '" + entry.key + "' costs too much on '" +
                                              path + "' (limit of " + std::to_string(kMatchLimit) + " steps)"};
      }
    }
  }
  return nullptr;
}

ModuleScale module_scale(const AdapterConfig& config, const std::vector<std::string>& paths) {
  const double* rank = config.rank_pattern.find(paths);
  const double* alpha = config.alpha_pattern.find(paths);
  ModuleScale result;
  result.rank = rank != nullptr ? static_cast<int32_t>(*rank) : config.rank;
  const double divisor = config.use_rslora ? std::sqrt(static_cast<double>(result.rank)) : result.rank;
  result.scale = static_cast<float>((alpha != nullptr ? *alpha : config.alpha) / divisor);
  return result;
}

}  // namespace moelora
