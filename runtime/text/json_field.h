// SPDX-License-Identifier: Apache-2.0
// A value of tokenizer.json together with where it stands, so that each refusal names the file and the field
// ("tokenizer.json: pre_tokenizer.pretokenizers[1].pattern: ..."). Views into a Json that outlives it.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/base/error.h"
#include "runtime/io/json.h"

namespace moelora {

class JsonField {
 public:
  // `source` names the file; both are borrowed. Throws kCorrupt if the root is no object.
  JsonField(const Json& root, const std::string& source);

  // Null, or absent from its object.
  [[nodiscard]] bool is_null() const { return value_ == nullptr || value_->is_null(); }
  [[nodiscard]] bool is_text() const { return value_ != nullptr && value_->is_string(); }
  // The member of an object; an absent one counts as null. Throws kCorrupt if this is no object.
  [[nodiscard]] JsonField member(const std::string& key) const;
  // Elements of an array; size() throws kCorrupt if this is none.
  [[nodiscard]] size_t size() const;
  [[nodiscard]] JsonField element(size_t index) const;

  // Typed values; throw kCorrupt for null and for another type. The _or forms take null as the fallback.
  [[nodiscard]] const std::string& text() const;
  [[nodiscard]] bool flag_or(bool fallback) const;
  [[nodiscard]] int32_t integer(int32_t lowest, int32_t highest) const;
  [[nodiscard]] double number() const;
  [[nodiscard]] const Json::object_t& object() const;
  // member("type") of an object.
  [[nodiscard]] const std::string& type() const { return member("type").text(); }
  // The raw list, for long ones: element() makes a name for each.
  [[nodiscard]] const Json& list() const;

  // Throws Error{status, "FILE: FIELD: what"}.
  [[noreturn]] void fail(Status status, const std::string& what) const;
  // Throws kUnsupported: the value exists elsewhere but is not implemented here.
  [[noreturn]] void fail_unsupported(const std::string& what) const;
  [[nodiscard]] std::string name() const;  // "FILE: FIELD"

 private:
  JsonField(const Json* value, const std::string* source, std::string path)
      : value_(value), source_(source), path_(std::move(path)) {}
  [[noreturn]] void fail_type(const char* wanted) const;

  const Json* value_;
  const std::string* source_;
  std::string path_;
};

}  // namespace moelora
