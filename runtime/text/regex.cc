// SPDX-License-Identifier: Apache-2.0
#define PCRE2_CODE_UNIT_WIDTH 8
#include "runtime/text/regex.h"

#include <pcre2.h>

#include <new>

#include <fmt/format.h>

#include "kernels/base/error.h"
#include "runtime/io/json.h"

namespace moelora {
namespace {

// A run of a class is one step whatever its length, so that texts of many megabytes stay far below; what reaches
// these is an expression that backtracks exponentially.
constexpr uint32_t kMatchLimit = 50'000'000;
constexpr uint32_t kHeapLimitKib = 64 * 1024;
constexpr size_t kStackBytes = 32 * 1024;
constexpr size_t kStackBytesMax = 1024 * 1024;
constexpr size_t kExpressionBytesMax = 64 * 1024;

constexpr const char* kWhiteSpace =
    R"(\x{09}-\x{0D}\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";

PCRE2_SPTR bytes_of(std::string_view text) {
  return reinterpret_cast<PCRE2_SPTR>(text.data());
}

std::string message_of(int fault) {
  PCRE2_UCHAR text[160] = {};
  pcre2_get_error_message(fault, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

[[noreturn]] void fail_dialect(const std::string& name, const char* what) {
  throw Error(Status::kUnsupported, fmt::format("{}: {} in a regular expression are not supported", name, what));
}

}  // namespace

struct RegexScratch::Parts {
  pcre2_match_data* match = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* stack = pcre2_jit_stack_create(kStackBytes, kStackBytesMax, nullptr);

  Parts() = default;
  ~Parts() {
    pcre2_jit_stack_free(stack);
    pcre2_match_context_free(context);
    pcre2_match_data_free(match);
  }
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;
};

RegexScratch::RegexScratch() : parts_(std::make_unique<Parts>()) {
  if (parts_->match == nullptr || parts_->context == nullptr) {
    throw std::bad_alloc();
  }
  pcre2_set_match_limit(parts_->context, kMatchLimit);
  pcre2_set_heap_limit(parts_->context, kHeapLimitKib);
  if (parts_->stack != nullptr) {  // without one, machine code runs on a small one of its own
    pcre2_jit_stack_assign(parts_->context, nullptr, parts_->stack);
  }
}
RegexScratch::~RegexScratch() = default;
RegexScratch::RegexScratch(RegexScratch&&) noexcept = default;
RegexScratch& RegexScratch::operator=(RegexScratch&&) noexcept = default;

struct Regex::Code {
  pcre2_code* code = nullptr;
  Code() = default;
  ~Code() { pcre2_code_free(code); }
  Code(const Code&) = delete;
  Code& operator=(const Code&) = delete;
};

Regex::Regex(const std::string& expression, std::string name)
    : code_(std::make_unique<Code>()), name_(std::move(name)) {
  if (expression.empty() || expression.size() > kExpressionBytesMax) {
    throw Error(Status::kCorrupt, fmt::format("{}: an expression of {} bytes; 1 to {} are allowed", name_,
                                              expression.size(), kExpressionBytesMax));
  }
  const std::string translated = to_pcre2(expression, name_);
  int fault = 0;
  PCRE2_SIZE offset = 0;
  // Lines: Oniguruma's ^ and $ stand at every one. \C could cut a code point in two.
  code_->code =
      pcre2_compile(bytes_of(translated), translated.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &fault, &offset, nullptr);
  if (code_->code == nullptr) {
    throw Error(Status::kCorrupt, fmt::format("{}: '{}' is not a regular expression: {}", name_, printable(expression),
                                              message_of(fault)));
  }
  // Where the system forbids writable code, matching interprets.
  (void)pcre2_jit_compile(code_->code, PCRE2_JIT_COMPLETE);
}
Regex::~Regex() = default;
Regex::Regex(Regex&&) noexcept = default;
Regex& Regex::operator=(Regex&&) noexcept = default;

bool Regex::find(std::string_view text, size_t from, RegexScratch& scratch, size_t* begin, size_t* end) const {
  constexpr uint32_t kOptions = PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY;
  RegexScratch::Parts& parts = *scratch.parts_;
  const auto match = [&](uint32_t options) {
    return pcre2_match(code_->code, bytes_of(text), text.size(), from, options, parts.match, parts.context);
  };
  int found = match(kOptions);
  if (found == PCRE2_ERROR_JIT_STACKLIMIT) {
    found = match(kOptions | PCRE2_NO_JIT);
  }
  if (found == PCRE2_ERROR_NOMATCH) {
    return false;
  }
  if (found < 0) {
    throw Error(found == PCRE2_ERROR_NOMEMORY ? Status::kNomem : Status::kInvalid,
                fmt::format("{}: the expression could not be matched at byte {} of a text: {}", name_, from,
                            message_of(found)));
  }
  const PCRE2_SIZE* range = pcre2_get_ovector_pointer(parts.match);
  *begin = range[0];
  *end = range[1];
  return true;
}

std::string to_pcre2(const std::string& expression, const std::string& name) {
  std::string out;
  bool in_class = false;
  for (size_t at = 0; at < expression.size(); ++at) {
    const char c = expression[at];
    const char next = at + 1 < expression.size() ? expression[at + 1] : '\0';
    if (c == '\\') {
      ++at;
      if (next == 's') {
        out += in_class ? kWhiteSpace : fmt::format("[{}]", kWhiteSpace);
      } else if (next == 'S' && !in_class) {
        out += fmt::format("[^{}]", kWhiteSpace);
      } else if (next == 'S' || next == 'h' || next == 'H' || next == 'Q' || next == 'E' || next == 'R' ||
                 next == 'K' || next == 'N') {
        throw Error(Status::kUnsupported, fmt::format("{}: '\\{}'{} in a regular expression is not supported", name,
                                                      next, in_class ? " inside a class" : ""));
      } else {
        out += c;
        if (at < expression.size()) {
          out += next;
        }
      }
      continue;
    }
    if (in_class && c == '[' && next != ':') {
      fail_dialect(name, "nested classes");
    }
    if (in_class && c == '&' && next == '&') {
      fail_dialect(name, "intersections of classes");
    }
    out += c;
    if (!in_class && c == '[') {
      in_class = true;
      if (next == '^') {
        out += '^';
        ++at;
      }
      // A bracket right behind the opening one is a member.
      if (at + 1 < expression.size() && expression[at + 1] == ']') {
        out += "\\]";
        ++at;
      }
    } else if (in_class && c == '[') {
      const size_t close = expression.find(":]", at);
      if (close == std::string::npos) {
        fail_dialect(name, "unfinished classes");
      }
      out.append(expression, at + 1, close + 1 - at);
      at = close + 1;
    } else if (in_class && c == ']') {
      in_class = false;
    }
  }
  return out;
}

std::string quoted(const std::string& text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    const bool plain =
        byte >= 0x80 || (byte >= '0' && byte <= '9') || (byte >= 'A' && byte <= 'Z') || (byte >= 'a' && byte <= 'z');
    out += plain ? std::string(1, c) : fmt::format("\\x{{{:02X}}}", byte);
  }
  return out;
}

}  // namespace moelora
