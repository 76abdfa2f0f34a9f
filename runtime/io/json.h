// SPDX-License-Identifier: Apache-2.0
// JSON from strangers: nlohmann-json behind a depth limit (64), a size limit and our errors. NaN and Infinity are
// refused, and so is a key given twice in one object. Objects keep file order (rank_pattern depends on it), so a
// look-up by name is linear: iterate over large objects. Called by every loader of model and adapter files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

namespace moelora {

using Json = nlohmann::ordered_json;

constexpr size_t kJsonDepthMax = 64;
constexpr size_t kJsonBytesMax = size_t{100} << 20;
constexpr size_t kJsonNodesMax = size_t{16} << 20;  // values in one document; bounds its memory

// `source` names the file in messages. Throws Error{kCorrupt} with source, line or key; {kIo} for files.
Json parse_json(const std::string& text, const std::string& source, size_t bytes_max = kJsonBytesMax);
Json read_json(const std::string& path, size_t bytes_max = kJsonBytesMax);
std::string read_text(const std::string& path, size_t bytes_max = kJsonBytesMax);
bool is_valid_utf8(const std::string& text);
// A name from a file made fit for a message: ill-formed UTF-8 and control characters become '?', long names are cut.
std::string printable(const std::string& text, size_t bytes_max = 200);

// Typed access that names source and key: missing or wrong type throws kCorrupt; the _or forms take null as missing.
int64_t json_int(const Json& object, const std::string& key, const std::string& source);
int64_t json_int_or(const Json& object, const std::string& key, int64_t fallback, const std::string& source);
double json_number(const Json& object, const std::string& key, const std::string& source);
double json_number_or(const Json& object, const std::string& key, double fallback, const std::string& source);
bool json_bool_or(const Json& object, const std::string& key, bool fallback, const std::string& source);
std::string json_string_or(const Json& object, const std::string& key, const std::string& fallback,
                           const std::string& source);

}  // namespace moelora
