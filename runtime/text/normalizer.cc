// SPDX-License-Identifier: Apache-2.0
// Decomposition and composition are utf8proc's; the sorting of combining marks is done here, because utf8proc's takes
// time quadratic in the length of a run of them, which a hostile text could make megabytes long.
#include "runtime/text/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <new>

#include <fmt/format.h>

#include "runtime/io/utf8.h"

namespace moelora {
namespace {

// All code points below combine with nothing before them and are their own NFC.
constexpr uint32_t kFirstThatChanges = 0x300;
constexpr unsigned char kFirstLeadThatChanges = 0xCC;  // of their UTF-8

using CodePoints = std::vector<utf8proc_int32_t>;

void append_decomposed(uint32_t code_point, utf8proc_option_t options, CodePoints& out) {
  utf8proc_int32_t parts[32];
  int boundary = 0;
  const utf8proc_ssize_t count =
      utf8proc_decompose_char(static_cast<utf8proc_int32_t>(code_point), parts, 32, options, &boundary);
  if (count < 0 || count > 32) {
    out.push_back(static_cast<utf8proc_int32_t>(code_point));  // no decomposition is longer than 18
    return;
  }
  out.insert(out.end(), parts, parts + count);
}

void sort_marks(CodePoints& points) {
  const auto combining_class = [](utf8proc_int32_t point) {
    return point < static_cast<utf8proc_int32_t>(kFirstThatChanges) ? 0 : utf8proc_get_property(point)->combining_class;
  };
  for (size_t at = 0; at < points.size();) {
    if (combining_class(points[at]) == 0) {
      ++at;
      continue;
    }
    size_t end = at + 1;
    while (end < points.size() && combining_class(points[end]) != 0) {
      ++end;
    }
    if (end - at > 1) {
      std::stable_sort(points.begin() + static_cast<std::ptrdiff_t>(at),
                       points.begin() + static_cast<std::ptrdiff_t>(end),
                       [&](auto a, auto b) { return combining_class(a) < combining_class(b); });
    }
    at = end;
  }
}

// A part that nothing outside it can combine with.
void append_form(std::string_view text, UnicodeForm form, CodePoints& points, std::string& out) {
  const bool compatible = form == UnicodeForm::kNfkc || form == UnicodeForm::kNfkd;
  const bool composed = form == UnicodeForm::kNfc || form == UnicodeForm::kNfkc;
  const auto options =
      static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | (compatible ? UTF8PROC_COMPAT : 0));
  points.clear();
  for (size_t at = 0, length = 0; at < text.size(); at += length) {
    append_decomposed(utf8_code_point(text, at, &length), options, points);
  }
  sort_marks(points);
  size_t count = points.size();
  if (composed) {
    const utf8proc_ssize_t left =
        utf8proc_normalize_utf32(points.data(), static_cast<utf8proc_ssize_t>(count),
                                 static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
    count = left < 0 ? count : static_cast<size_t>(left);
  }
  for (size_t i = 0; i < count; ++i) {
    utf8_append(static_cast<uint32_t>(points[i]), out);
  }
}

}  // namespace

std::string to_unicode_form(std::string_view text, UnicodeForm form) {
  std::string out;
  out.reserve(text.size());
  CodePoints points;
  if (form != UnicodeForm::kNfc) {
    append_form(text, form, points, out);
    return out;
  }
  // Parts of one code point below U+0300 and all above that follow it; text between them is copied.
  const auto changes = [&](size_t at) { return static_cast<unsigned char>(text[at]) >= kFirstLeadThatChanges; };
  size_t copied = 0;
  for (size_t at = 0; at < text.size();) {
    if (!changes(at)) {
      ++at;
      continue;
    }
    size_t begin = at;
    while (begin > copied && (static_cast<unsigned char>(text[begin - 1]) & 0xC0) == 0x80) {
      --begin;
    }
    begin -= begin > copied ? 1 : 0;
    size_t end = at;
    while (end < text.size() && changes(end)) {
      end += utf8_sequence(text, end);
    }
    out.append(text, copied, begin - copied);
    append_form(text.substr(begin, end - begin), form, points, out);
    copied = at = end;
  }
  out.append(text, copied, text.size() - copied);
  return out;
}

void replace_all(std::string& text, std::string_view pattern, std::string_view content) {
  size_t at = text.find(pattern);
  if (at == std::string::npos) {
    return;
  }
  std::string out;
  out.reserve(text.size());
  size_t copied = 0;
  for (; at != std::string::npos; at = text.find(pattern, copied)) {
    out.append(text, copied, at - copied).append(content);
    copied = at + pattern.size();
  }
  text = out.append(text, copied);
}

Normalizer::Normalizer(const JsonField& field) {
  if (!field.is_null()) {
    add(field);
  }
}

void Normalizer::add(const JsonField& field) {
  static constexpr std::pair<const char*, UnicodeForm> kForms[] = {{"NFC", UnicodeForm::kNfc},
                                                                   {"NFD", UnicodeForm::kNfd},
                                                                   {"NFKC", UnicodeForm::kNfkc},
                                                                   {"NFKD", UnicodeForm::kNfkd}};
  const std::string& type = field.type();
  for (const auto& [name, form] : kForms) {
    if (type == name) {
      steps_.push_back({Kind::kForm, form, {}, {}, nullptr});
      return;
    }
  }
  if (type == "Sequence") {
    const JsonField parts = field.member("normalizers");
    for (size_t i = 0; i < parts.size(); ++i) {
      add(parts.element(i));
    }
  } else if (type == "Prepend") {
    steps_.push_back({Kind::kPrepend, {}, {}, field.member("prepend").text(), nullptr});
  } else if (type == "Replace") {
    add_replace(field);
  } else {
    field.member("type").fail_unsupported(type);
  }
}

void Normalizer::add_replace(const JsonField& field) {
  const JsonField pattern = field.member("pattern");
  const std::string& content = field.member("content").text();
  if (const JsonField text = pattern.member("String"); !text.is_null()) {
    if (text.text().empty()) {
      text.fail(Status::kCorrupt, "an empty pattern");
    }
    steps_.push_back({Kind::kReplaceText, {}, text.text(), content, nullptr});
  } else {
    const JsonField expression = pattern.member("Regex");
    steps_.push_back(
        {Kind::kReplaceRegex, {}, {}, content, std::make_unique<Regex>(expression.text(), expression.name())});
  }
}

void Normalizer::apply(std::string& text, RegexScratch& scratch) const {
  for (const Step& step : steps_) {
    if (text.empty()) {
      return;
    }
    switch (step.kind) {
      case Kind::kForm:
        if (std::any_of(text.begin(), text.end(), [&](char c) {
              return static_cast<unsigned char>(c) >= (step.form == UnicodeForm::kNfc ? kFirstLeadThatChanges : 0x80);
            })) {
          text = to_unicode_form(text, step.form);
        }
        break;
      case Kind::kPrepend:
        text.insert(0, step.content);
        break;
      case Kind::kReplaceText:
        replace_all(text, step.pattern, step.content);
        break;
      case Kind::kReplaceRegex: {
        std::string out;
        size_t at = 0;
        for (size_t begin = 0, end = 0; at < text.size() && step.regex->find(text, at, scratch, &begin, &end);
             at = end) {
          out.append(text, at, begin - at).append(step.content);
        }
        text = out.append(text, at);
        break;
      }
    }
  }
}

}  // namespace moelora
