// SPDX-License-Identifier: Apache-2.0
// JSON parsing for files from strangers. nlohmann's event parser does the lexing; the builder here makes the
// document, because the library's own one looks each key up in a list (quadratic for a shard index of 90,000
// tensors), keeps the last of two equal keys and knows no limit of depth. Every fault is reported with the file,
// line and the key that was being read.
#include "runtime/io/json.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <unordered_set>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "kernels/base/error.h"
#include "runtime/io/utf8.h"

namespace moelora {
namespace {

constexpr size_t kFewKeys = 16;
constexpr size_t kFewEntries = 4;
constexpr size_t kEntryBytes = 100;  // about the least that one tensor takes in a safetensors header

// Receives the events of nlohmann's parser and builds the document.
class Builder : public nlohmann::json_sax<Json> {
 public:
  Builder(const std::string& text, const std::string& source) : text_(text), source_(source) {}

  Json take() { return std::move(root_); }

  bool null() override { return value(nullptr); }
  bool boolean(bool v) override { return value(v); }
  bool number_integer(number_integer_t v) override { return value(v); }
  bool number_unsigned(number_unsigned_t v) override { return value(v); }
  bool number_float(number_float_t v, const string_t&) override { return value(v); }
  bool string(string_t& v) override { return value(std::move(v)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(Json::object()); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& v) override {
    Level& level = levels_.back();
    level.key = v;
    if (is_repeated(level)) {
      fail(fmt::format("key '{}' is given twice in one object", printable(v)));
    }
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    // The library's own text may quote ill-formed bytes, so only its kind is used.
    const size_t at = position > 0 ? position - 1 : 0;
    const char next = at < text_.size() ? text_[at] : '\0';
    std::string reason = "not valid JSON";
    if (error.id == 406) {
      reason = "number out of range";
    } else if (std::strstr(error.what(), "UTF-8") != nullptr) {
      reason = "ill-formed UTF-8";
    } else if (next == 'N' || next == 'I') {
      reason = "NaN and Infinity are not allowed";
    } else if (at >= text_.size()) {
      reason = "not valid JSON: the text ends too early";
    }
    const size_t line =
        1 + static_cast<size_t>(std::count(
                text_.begin(), text_.begin() + static_cast<std::ptrdiff_t>(std::min(at, text_.size())), '\n'));
    fail(fmt::format("line {}: {}", line, reason));
  }

 private:
  struct Level {
    Json* container;
    std::string key;                       // last key read, for messages and for the value that follows
    std::unordered_set<std::string> seen;  // of objects with more than kFewKeys keys
  };

  [[noreturn]] void fail(const std::string& what) const {
    std::string place;
    for (const Level& level : levels_) {
      if (level.key.empty()) {
        continue;
      }
      place += (place.empty() ? "" : ".") + level.key;
    }
    throw Error(Status::kCorrupt, place.empty() ? fmt::format("{}: {}", source_, what)
                                                : fmt::format("{}: {} (at '{}')", source_, what, printable(place)));
  }

  // Whether the object already has the key that was just read. Most objects are small: a set would only slow them.
  static bool is_repeated(Level& level) {
    const auto& object = level.container->get_ref<const Json::object_t&>();
    if (object.size() < kFewKeys) {
      return std::any_of(object.begin(), object.end(), [&](const auto& item) { return item.first == level.key; });
    }
    if (level.seen.empty()) {
      for (const auto& item : object) {
        level.seen.insert(item.first);
      }
    }
    return !level.seen.insert(level.key).second;
  }

  Json* append(Json&& v) {
    if (++nodes_ > kJsonNodesMax) {
      fail(fmt::format("more than {} values", kJsonNodesMax));
    }
    if (levels_.empty()) {
      root_ = std::move(v);
      return &root_;
    }
    Level& level = levels_.back();
    if (level.container->is_array()) {
      auto& array = level.container->get_ref<Json::array_t&>();
      return &array.emplace_back(std::move(v));
    }
    auto& object = level.container->get_ref<Json::object_t&>();
    return &object.emplace_back(level.key, std::move(v)).second;
  }

  template <class T>
  bool value(T&& v) {
    append(Json(std::forward<T>(v)));
    return true;
  }

  // A container's address stays valid while it is open: its parent grows only after it is closed.
  bool open(Json&& empty) {
    if (levels_.size() >= kJsonDepthMax) {
      fail(fmt::format("nested deeper than {} levels", kJsonDepthMax));
    }
    Json* container = append(std::move(empty));
    // Growing an object copies its entries. A safetensors header is one object of up to tens of thousands of them.
    if (container->is_object()) {
      container->get_ref<Json::object_t&>().reserve(levels_.empty() ? text_.size() / kEntryBytes : kFewEntries);
    }
    levels_.push_back({container, {}, {}});
    return true;
  }

  bool close() {
    levels_.pop_back();
    return true;
  }

  const std::string& text_;
  const std::string& source_;
  Json root_;
  std::vector<Level> levels_;
  size_t nodes_ = 0;
};

const Json* member(const Json& object, const std::string& key, const std::string& source) {
  if (!object.is_object()) {
    throw Error(Status::kCorrupt, fmt::format("{}: expected a JSON object around key '{}'", source, key));
  }
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

[[noreturn]] void fail_type(const Json& value, const std::string& key, const char* wanted, const std::string& source) {
  throw Error(Status::kCorrupt,
              fmt::format("{}: key '{}' must be {}, found {}", source, key, wanted, value.type_name()));
}

[[noreturn]] void fail_missing(const std::string& key, const std::string& source) {
  throw Error(Status::kCorrupt, fmt::format("{}: key '{}' is missing", source, key));
}

int64_t to_int(const Json& value, const std::string& key, const std::string& source) {
  if (!value.is_number_integer()) {
    fail_type(value, key, "an integer", source);
  }
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) {
    throw Error(Status::kCorrupt, fmt::format("{}: key '{}' is out of range", source, key));
  }
  return value.get<int64_t>();
}

double to_number(const Json& value, const std::string& key, const std::string& source) {
  if (!value.is_number()) {
    fail_type(value, key, "a number", source);
  }
  const double number = value.get<double>();
  if (!std::isfinite(number)) {
    throw Error(Status::kCorrupt, fmt::format("{}: key '{}' is not a finite number", source, key));
  }
  return number;
}

[[noreturn]] void fail_io(const std::string& path, const char* what, int error) {
  throw Error(Status::kIo, fmt::format("{}: {}: {}", path, what, std::strerror(error)));
}

struct FileDescriptor {
  int fd;
  ~FileDescriptor() {
    if (fd >= 0) {
      ::close(fd);
    }
  }
};

}  // namespace

Json parse_json(const std::string& text, const std::string& source, size_t bytes_max) {
  if (text.size() > bytes_max) {
    throw Error(Status::kCorrupt,
                fmt::format("{}: {} bytes of JSON, more than the limit of {}", source, text.size(), bytes_max));
  }
  // The lexer takes a zero byte for the end of the text; what follows it would go unread.
  if (text.find('\0') != std::string::npos) {
    throw Error(Status::kCorrupt, fmt::format("{}: not valid JSON: a zero byte in the text", source));
  }
  Builder builder(text, source);
  if (!Json::sax_parse(text, &builder)) {
    throw Error(Status::kCorrupt, fmt::format("{}: not valid JSON", source));
  }
  return builder.take();
}

Json read_json(const std::string& path, size_t bytes_max) {
  return parse_json(read_text(path, bytes_max), path, bytes_max);
}

std::string read_text(const std::string& path, size_t bytes_max) {
  // O_NONBLOCK: a FIFO in place of a file must not block the caller.
  const FileDescriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.fd < 0) {
    fail_io(path, "cannot open", errno);
  }
  struct stat info{};
  if (::fstat(file.fd, &info) != 0) {
    fail_io(path, "cannot read", errno);
  }
  if (!S_ISREG(info.st_mode)) {
    throw Error(Status::kIo, fmt::format("{}: not a regular file", path));
  }
  if (static_cast<uint64_t>(info.st_size) > bytes_max) {
    throw Error(Status::kCorrupt,
                fmt::format("{}: {} bytes, more than the limit of {}", path, info.st_size, bytes_max));
  }
  std::string text(static_cast<size_t>(info.st_size), '\0');
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t got = ::read(file.fd, text.data() + done, text.size() - done);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      fail_io(path, "cannot read", errno);
    }
    if (got == 0) {
      break;
    }
    done += static_cast<size_t>(got);
  }
  text.resize(done);
  return text;
}

bool is_valid_utf8(const std::string& text) {
  for (size_t at = 0; at < text.size();) {
    const size_t length = utf8_sequence(text, at);
    if (length == 0) {
      return false;
    }
    at += length;
  }
  return true;
}

std::string printable(const std::string& text, size_t bytes_max) {
  std::string result;
  for (size_t at = 0; at < text.size();) {
    const size_t length = utf8_sequence(text, at);
    if (result.size() + std::max<size_t>(length, 1) > bytes_max) {
      return result + "...";
    }
    const auto byte = static_cast<unsigned char>(text[at]);
    if (length == 0 || byte < 0x20 || byte == 0x7F) {
      result += '?';
    } else {
      result.append(text, at, length);
    }
    at += std::max<size_t>(length, 1);
  }
  return result;
}

int64_t json_int(const Json& object, const std::string& key, const std::string& source) {
  const Json* value = member(object, key, source);
  if (value == nullptr) {
    fail_missing(key, source);
  }
  return to_int(*value, key, source);
}

int64_t json_int_or(const Json& object, const std::string& key, int64_t fallback, const std::string& source) {
  const Json* value = member(object, key, source);
  return value == nullptr ? fallback : to_int(*value, key, source);
}

double json_number(const Json& object, const std::string& key, const std::string& source) {
  const Json* value = member(object, key, source);
  if (value == nullptr) {
    fail_missing(key, source);
  }
  return to_number(*value, key, source);
}

double json_number_or(const Json& object, const std::string& key, double fallback, const std::string& source) {
  const Json* value = member(object, key, source);
  return value == nullptr ? fallback : to_number(*value, key, source);
}

bool json_bool_or(const Json& object, const std::string& key, bool fallback, const std::string& source) {
  const Json* value = member(object, key, source);
  if (value == nullptr) {
    return fallback;
  }
  if (!value->is_boolean()) {
    fail_type(*value, key, "true or false", source);
  }
  return value->get<bool>();
}

std::string json_string_or(const Json& object, const std::string& key, const std::string& fallback,
                           const std::string& source) {
  const Json* value = member(object, key, source);
  if (value == nullptr) {
    return fallback;
  }
  if (!value->is_string()) {
    fail_type(*value, key, "a string", source);
  }
  return value->get<std::string>();
}

}  // namespace moelora
