// SPDX-License-Identifier: Apache-2.0
#include "runtime/text/pre_tokenizer.h"

#include <algorithm>
#include <utility>

#include "runtime/text/normalizer.h"

namespace moelora {
namespace {

// What ByteLevel with use_regex means.
constexpr const char* kGpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

}  // namespace

PreTokenizer::PreTokenizer(const JsonField& field) {
  if (!field.is_null()) {
    add(field);
  }
}

void PreTokenizer::add(const JsonField& field) {
  const std::string& type = field.type();
  // The alphabet is applied once, behind everything else.
  if (byte_level_) {
    field.fail(Status::kUnsupported, "a stage behind ByteLevel is not supported");
  }
  if (type == "Sequence") {
    const JsonField parts = field.member("pretokenizers");
    for (size_t i = 0; i < parts.size(); ++i) {
      add(parts.element(i));
    }
  } else if (type == "Split") {
    add_split(field);
  } else if (type == "Digits") {
    const bool individual = field.member("individual_digits").flag_or(false);
    stages_.push_back(
        {Kind::kSplit, std::make_unique<Regex>(individual ? "\\p{N}" : "\\p{N}+", field.name()), {}, {}, false});
  } else if (type == "ByteLevel") {
    if (field.member("add_prefix_space").flag_or(true)) {
      stages_.push_back({Kind::kPrefixSpace, nullptr, {}, {}, false});
    }
    if (field.member("use_regex").flag_or(true)) {
      stages_.push_back({Kind::kSplit, std::make_unique<Regex>(kGpt2, field.name()), {}, {}, false});
    }
    byte_level_ = true;
  } else if (type == "Metaspace") {
    add_metaspace(field);
  } else {
    field.member("type").fail_unsupported(type);
  }
}

void PreTokenizer::add_split(const JsonField& field) {
  if (const JsonField behavior = field.member("behavior"); behavior.text() != "Isolated") {
    behavior.fail_unsupported(behavior.text());
  }
  if (const JsonField invert = field.member("invert"); invert.flag_or(false)) {
    invert.fail_unsupported("true");
  }
  const JsonField pattern = field.member("pattern");
  const JsonField literal = pattern.member("String");
  const JsonField expression = literal.is_null() ? pattern.member("Regex") : literal;
  const std::string text = literal.is_null() ? expression.text() : quoted(literal.text());
  stages_.push_back({Kind::kSplit, std::make_unique<Regex>(text, expression.name()), {}, {}, false});
}

void PreTokenizer::add_metaspace(const JsonField& field) {
  Stage stage{Kind::kMetaspace, nullptr, field.member("replacement").text(), Prepend::kAlways, true};
  if (stage.mark.empty()) {
    field.member("replacement").fail(Status::kCorrupt, "is empty");
  }
  const JsonField scheme = field.member("prepend_scheme");
  if (!scheme.is_null()) {
    const std::string& name = scheme.text();
    if (name != "always" && name != "first" && name != "never") {
      scheme.fail_unsupported(name);
    }
    stage.prepend = name == "first" ? Prepend::kFirst : name == "never" ? Prepend::kNever : Prepend::kAlways;
  } else if (!field.member("add_prefix_space").flag_or(true)) {  // older files
    stage.prepend = Prepend::kNever;
  }
  stage.split = field.member("split").flag_or(true);
  stages_.push_back(std::move(stage));
}

void PreTokenizer::apply(Pieces& pieces, bool at_start, RegexScratch& scratch) const {
  pieces.ends.assign(1, pieces.text.size());
  for (const Stage& stage : stages_) {
    switch (stage.kind) {
      case Kind::kSplit:
        split(*stage.regex, pieces, scratch);
        break;
      case Kind::kPrefixSpace:
        prefix_space(pieces);
        break;
      case Kind::kMetaspace:
        metaspace(stage, pieces, at_start);
        break;
    }
  }
}

// Matches and the gaps between them are pieces. An expression sees its piece alone: anchors and look-around end at
// its borders.
void PreTokenizer::split(const Regex& regex, Pieces& pieces, RegexScratch& scratch) {
  std::swap(pieces.ends, pieces.spare);
  pieces.ends.clear();
  const std::string_view text = pieces.text;
  size_t start = 0;
  for (const size_t stop : pieces.spare) {
    const std::string_view piece = text.substr(start, stop - start);
    size_t at = 0;
    size_t begin = 0;
    size_t end = 0;
    while (at < piece.size() && regex.find(piece, at, scratch, &begin, &end)) {
      if (begin > at) {
        pieces.ends.push_back(start + begin);
      }
      pieces.ends.push_back(start + end);
      at = end;
    }
    if (at < piece.size()) {
      pieces.ends.push_back(stop);
    }
    start = stop;
  }
}

void PreTokenizer::prefix_space(Pieces& pieces) {
  std::string text;
  size_t start = 0;
  for (size_t& end : pieces.ends) {
    text += pieces.text[start] == ' ' ? "" : " ";
    text.append(pieces.text, start, end - start);
    start = std::exchange(end, text.size());
  }
  pieces.text = std::move(text);
}

void PreTokenizer::metaspace(const Stage& stage, Pieces& pieces, bool at_start) {
  std::string text;
  std::vector<size_t> ends;
  size_t start = 0;
  for (const size_t end : pieces.ends) {
    std::string piece = pieces.text.substr(start, end - start);
    replace_all(piece, " ", stage.mark);
    const bool wanted =
        stage.prepend == Prepend::kAlways || (stage.prepend == Prepend::kFirst && at_start && start == 0);
    if (wanted && !piece.starts_with(stage.mark)) {
      piece.insert(0, stage.mark);
    }
    // With `split` each mark begins a piece.
    for (size_t at = stage.split ? piece.find(stage.mark, 1) : std::string::npos; at != std::string::npos;
         at = piece.find(stage.mark, at + stage.mark.size())) {
      ends.push_back(text.size() + at);
    }
    text += piece;
    ends.push_back(text.size());
    start = end;
  }
  pieces.text = std::move(text);
  pieces.ends = std::move(ends);
}

}  // namespace moelora
