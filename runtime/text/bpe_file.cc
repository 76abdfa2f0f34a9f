// SPDX-License-Identifier: Apache-2.0
// Reads the field `model` of tokenizer.json into a Bpe. Whatever encoding would trip over later is refused here.
#include <algorithm>
#include <bit>

#include <fmt/format.h>

#include "runtime/io/utf8.h"
#include "runtime/text/bpe.h"
#include "runtime/text/byte_alphabet.h"

namespace moelora {
namespace {

constexpr uint32_t kMarkPoint = 0x2581;

// Whether U+2581 stands behind another character anywhere in the text.
bool has_inner_mark(std::string_view text) {
  bool other = false;
  for (size_t at = 0, length = 0; at < text.size(); at += length) {
    const bool mark = utf8_code_point(text, at, &length) == kMarkPoint;
    if (mark && other) {
      return true;
    }
    other = !mark;
  }
  return false;
}

// An entry of `merges`: "a b" or ["a", "b"].
std::pair<std::string_view, std::string_view> merged_pair(const Json& entry, const JsonField& field, size_t rank) {
  if (entry.is_array() && entry.size() == 2 && entry[0].is_string() && entry[1].is_string()) {
    return {entry[0].get_ref<const std::string&>(), entry[1].get_ref<const std::string&>()};
  }
  if (entry.is_string()) {
    const std::string_view text = entry.get_ref<const std::string&>();
    if (const size_t space = text.find(' '); space != std::string_view::npos) {
      return {text.substr(0, space), text.substr(space + 1)};
    }
  }
  field.element(rank).fail(Status::kCorrupt, "must be two tokens, as a list or with a space between");
}

}  // namespace

void Vocabulary::set(int32_t id, const std::string& text) {
  const auto index = static_cast<size_t>(id);
  if (index >= texts.size()) {
    texts.resize(index + 1);
    present.resize(index + 1, false);
  }
  texts[index] = text;
  present[index] = true;
}

Bpe::Bpe(const JsonField& model, bool byte_level, Vocabulary& vocabulary) : byte_level_(byte_level) {
  read_settings(model);
  const TextIds ids = read_vocabulary(model.member("vocab"), vocabulary);
  read_start_symbols(ids);
  read_unknown(model.member("unk_token"), ids);
  read_merges(model.member("merges"), ids);
}

void Bpe::read_settings(const JsonField& model) {
  // Some old files have no type; what else they must have is checked below.
  if (const JsonField type = model.member("type"); !type.is_null() && type.text() != "BPE") {
    type.fail_unsupported(type.text());
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (const JsonField field = model.member(key); !field.is_null() && !field.text().empty()) {
      field.fail_unsupported(field.text());
    }
  }
  const JsonField dropout = model.member("dropout");
  if (!dropout.is_null() && dropout.number() != 0.0) {
    dropout.fail(Status::kUnsupported, "random merges are not supported; it must be null or 0");
  }
  byte_fallback_ = model.member("byte_fallback").flag_or(false);
  fuse_unknown_ = model.member("fuse_unk").flag_or(false);
  ignore_merges_ = model.member("ignore_merges").flag_or(false);
}

Bpe::TextIds Bpe::read_vocabulary(const JsonField& field, Vocabulary& vocabulary) {
  const Json::object_t& entries = field.object();
  if (entries.empty()) {
    field.fail(Status::kCorrupt, "has no token");
  }
  TextIds ids;
  ids.reserve(entries.size());
  for (const auto& [text, value] : entries) {
    const bool fits = value.is_number_unsigned() && value.get<uint64_t>() <= kTokenIdMax;
    if (!fits) {
      field.fail(Status::kCorrupt, fmt::format("the id of '{}' must be an integer from 0 to {}, found {}",
                                               printable(text), kTokenIdMax, printable(value.dump())));
    }
    const auto id = static_cast<int32_t>(value.get<uint64_t>());
    const auto index = static_cast<size_t>(id);
    if (index < vocabulary.present.size() && vocabulary.present[index]) {
      field.fail(Status::kCorrupt, fmt::format("id {} is given to '{}' and to '{}'", id,
                                               printable(vocabulary.texts[index]), printable(text)));
    }
    vocabulary.set(id, text);
    ids.emplace(text, id);
  }
  return ids;
}

void Bpe::read_start_symbols(const TextIds& ids) {
  std::fill(std::begin(byte_ids_), std::end(byte_ids_), -1);
  std::string bytes;
  for (const auto& [text, id] : ids) {
    if (byte_level_) {
      if (!from_byte_alphabet(text, bytes)) {
        continue;  // no text becomes this one
      }
      if (bytes.size() == 1) {
        byte_ids_[static_cast<unsigned char>(bytes[0])] = id;
      }
      if (ignore_merges_) {
        whole_.emplace(bytes, id);
      }
      continue;
    }
    if (ignore_merges_) {
      whole_.emplace(text, id);
    }
    size_t length = 0;
    if (text.empty() || utf8_sequence(text, 0) != text.size()) {
      continue;
    }
    const uint32_t point = utf8_code_point(text, 0, &length);
    if (point >= char_ids_.size()) {
      char_ids_.resize(point + 1, -1);
    }
    char_ids_[point] = id;
  }
  for (unsigned byte = 0; !byte_level_ && byte < 256; ++byte) {
    const auto found = ids.find(fmt::format("<0x{:02X}>", byte));
    byte_ids_[byte] = found == ids.end() ? -1 : found->second;
  }
}

void Bpe::read_unknown(const JsonField& field, const TextIds& ids) {
  if (field.is_null()) {
    return;
  }
  const auto found = ids.find(field.text());
  if (found == ids.end()) {
    field.fail(Status::kCorrupt, fmt::format("'{}' is not in model.vocab", printable(field.text())));
  }
  unknown_ = found->second;
}

void Bpe::read_merges(const JsonField& field, const TextIds& ids) {
  const size_t count = field.size();
  if (count > 0) {
    merges_.resize(std::bit_ceil(count * 2));
    merge_shift_ = 64 - std::countr_zero(merges_.size());
  }
  // Parts of one symbol, and a mark that merges with nothing before it: then texts fall apart at their spaces.
  cut_at_marks_ = !byte_level_ && !ignore_merges_ && kMarkPoint < char_ids_.size() && char_ids_[kMarkPoint] >= 0;
  const auto id_of = [&](size_t rank, std::string_view text) {
    const auto found = ids.find(text);
    if (found == ids.end()) {
      field.element(rank).fail(Status::kCorrupt,
                               fmt::format("'{}' is not in model.vocab", printable(std::string(text))));
    }
    return static_cast<uint32_t>(found->second);
  };
  const Json& list = field.list();
  std::string whole;
  for (size_t rank = 0; rank < count; ++rank) {
    const auto [left, right] = merged_pair(list[rank], field, rank);
    whole.assign(left).append(right);
    const uint64_t pair = static_cast<uint64_t>(id_of(rank, left)) << 32 | id_of(rank, right);
    insert_merge({pair, static_cast<int32_t>(rank), static_cast<int32_t>(id_of(rank, whole))});
    cut_at_marks_ = cut_at_marks_ && !has_inner_mark(whole);
  }
}

void Bpe::insert_merge(const Merge& merge) {
  const size_t mask = merges_.size() - 1;
  for (size_t at = (merge.pair * 0x9E3779B97F4A7C15) >> merge_shift_;; ++at) {
    Merge& slot = merges_[at & mask];
    if (slot.pair == UINT64_MAX || slot.pair == merge.pair) {  // of two equal ones the last holds
      slot = merge;
      return;
    }
  }
}

}  // namespace moelora
