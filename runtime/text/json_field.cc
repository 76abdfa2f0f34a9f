// SPDX-License-Identifier: Apache-2.0
#include "runtime/text/json_field.h"

#include <fmt/format.h>

namespace moelora {

JsonField::JsonField(const Json& root, const std::string& source) : value_(&root), source_(&source) {
  if (!root.is_object()) {
    fail_type("an object");
  }
}

JsonField JsonField::member(const std::string& key) const {
  const auto& members = object();
  std::string path = path_.empty() ? key : path_ + "." + key;
  for (const auto& item : members) {
    if (item.first == key) {
      return {&item.second, source_, std::move(path)};
    }
  }
  return {nullptr, source_, std::move(path)};
}

const Json& JsonField::list() const {
  if (value_ == nullptr || !value_->is_array()) {
    fail_type("a list");
  }
  return *value_;
}

size_t JsonField::size() const {
  return list().size();
}

JsonField JsonField::element(size_t index) const {
  return {&(*value_)[index], source_, fmt::format("{}[{}]", path_, index)};
}

const std::string& JsonField::text() const {
  if (!is_text()) {
    fail_type("a string");
  }
  return value_->get_ref<const std::string&>();
}

bool JsonField::flag_or(bool fallback) const {
  if (is_null()) {
    return fallback;
  }
  if (!value_->is_boolean()) {
    fail_type("true or false");
  }
  return value_->get<bool>();
}

int32_t JsonField::integer(int32_t lowest, int32_t highest) const {
  if (value_ == nullptr || !value_->is_number_integer()) {
    fail_type("an integer");
  }
  const bool huge = value_->is_number_unsigned() && value_->get<uint64_t>() > static_cast<uint64_t>(INT64_MAX);
  const int64_t number = huge ? INT64_MAX : value_->get<int64_t>();
  if (number < lowest || number > highest) {
    fail(Status::kCorrupt, fmt::format("{} is out of range, {} to {}", value_->dump(), lowest, highest));
  }
  return static_cast<int32_t>(number);
}

double JsonField::number() const {
  if (value_ == nullptr || !value_->is_number()) {
    fail_type("a number");
  }
  return value_->get<double>();
}

const Json::object_t& JsonField::object() const {
  if (value_ == nullptr || !value_->is_object()) {
    fail_type("an object");
  }
  return value_->get_ref<const Json::object_t&>();
}

std::string JsonField::name() const {
  return path_.empty() ? *source_ : fmt::format("{}: {}", *source_, printable(path_));
}

void JsonField::fail(Status status, const std::string& what) const {
  throw Error(status, fmt::format("{}: {}", name(), what));
}

void JsonField::fail_unsupported(const std::string& what) const {
  fail(Status::kUnsupported, fmt::format("'{}' is not supported", printable(what)));
}

void JsonField::fail_type(const char* wanted) const {
  fail(Status::kCorrupt, is_null() ? fmt::format("is missing; {} is needed", wanted)
                                   : fmt::format("must be {}, found {}", wanted, value_->type_name()));
}

}  // namespace moelora
