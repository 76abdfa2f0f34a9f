// SPDX-License-Identifier: Apache-2.0
// JSON from strangers: what is refused, with which status and words, and that order and values survive.
#include "runtime/io/json.h"

#include <sys/stat.h>

#include "kernels/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/expect_error.h"
#include "tests/support/model_files.h"

using namespace moelora;
using namespace moelora::test;

TEST_CASE("json: values and the order of keys survive") {
  const Json json =
      parse_json(R"({"z": 1, "a": [true, null, -2, 2.5, "x\u00e9"], "m": {"k": 18446744073709551615}})", "f");
  std::string keys;
  for (const auto& item : json.items()) {
    keys += item.key();
  }
  CHECK(keys == "zam");
  CHECK(json["a"].size() == 5);
  CHECK(json["a"][0].get<bool>());
  CHECK(json["a"][1].is_null());
  CHECK(json["a"][2].get<int>() == -2);
  CHECK(json["a"][3].get<double>() == 2.5);
  CHECK(json["a"][4].get<std::string>() == "x\xC3\xA9");
  CHECK(json["m"]["k"].get<uint64_t>() == UINT64_MAX);
  CHECK(parse_json("3", "f").get<int>() == 3);
}

TEST_CASE("json: faults name the file, the line and the key") {
  const auto parse = [](const std::string& text) { return parse_json(text, "cfg.json"); };
  CHECK_ERROR(Status::kCorrupt, ({"cfg.json", "alpha", "NaN"}), parse("{\"r\": 1,\n \"alpha\": NaN}"));
  CHECK_ERROR(Status::kCorrupt, ({"cfg.json", "line 2"}), parse("{\"r\": 1,\n \"alpha\": NaN}"));
  CHECK_ERROR(Status::kCorrupt, ({"cfg.json", "alpha", "Infinity"}), parse("{\"alpha\": Infinity}"));
  CHECK_ERROR(Status::kCorrupt, ({"cfg.json", "alpha", "Infinity"}), parse("{\"alpha\": -Infinity}"));
  CHECK_ERROR(Status::kCorrupt, ({"cfg.json", "alpha", "out of range"}), parse("{\"alpha\": 1e999}"));
  CHECK_ERROR(Status::kCorrupt, ({"cfg.json", "outer.inner", "twice"}),
              parse("{\"outer\": {\"inner\": 1, \"x\": 2, \"inner\": 1}}"));
  CHECK_ERROR(Status::kCorrupt, ({"cfg.json", "UTF-8"}), parse("{\"a\": \"\xFF\"}"));
  CHECK_ERROR(Status::kCorrupt, ({"cfg.json", "zero byte"}), parse(std::string("{}\0{", 4)));
  CHECK_ERROR(Status::kCorrupt, ({"cfg.json", "too early"}), parse("{\"a\": [1"));
  CHECK_ERROR(Status::kCorrupt, ({"cfg.json", "too early"}), parse(""));
  CHECK_ERROR(Status::kCorrupt, ({"cfg.json", "not valid JSON"}), parse("{} {}"));
  CHECK_ERROR(Status::kCorrupt, ({"cfg.json", "not valid JSON"}), parse("{'a': 1}"));
  CHECK_ERROR(Status::kCorrupt, ({"cfg.json", "not valid JSON"}), parse("[1,]"));
}

TEST_CASE("json: limits of depth and size") {
  const std::string open(64, '[');
  const std::string close(64, ']');
  CHECK(parse_json(open + close, "f").is_array());
  CHECK_ERROR(Status::kCorrupt, ({"f", "64 levels"}), parse_json("[" + open + close + "]", "f"));
  CHECK_ERROR(Status::kCorrupt, ({"f", "64 levels"}), parse_json(std::string(5000000, '['), "f"));
  CHECK_ERROR(Status::kCorrupt, ({"f", "limit of 10"}), parse_json("[1,2,3,4,5,6]", "f", 10));
}

TEST_CASE("json: files that cannot be read") {
  const TempDir dir;
  CHECK_ERROR(Status::kIo, ({"absent.json", "cannot open"}), read_json(dir.file("absent.json")));
  CHECK_ERROR(Status::kIo, ({dir.path(), "not a regular file"}), read_json(dir.path()));
  REQUIRE(::mkfifo(dir.file("fifo").c_str(), 0600) == 0);
  CHECK_ERROR(Status::kIo, ({"fifo", "not a regular file"}), read_json(dir.file("fifo")));
  write_file(dir.file("big.json"), "[1,2,3,4,5,6]");
  CHECK_ERROR(Status::kCorrupt, ({"big.json", "limit of 10"}), read_json(dir.file("big.json"), 10));
  CHECK(read_json(dir.file("big.json")).size() == 6);
}

TEST_CASE("json: typed access names source and key") {
  const Json json =
      parse_json(R"({"i": 7, "f": 2.5, "b": true, "s": "x", "n": null, "big": 18446744073709551615})", "f");
  CHECK(json_int(json, "i", "f") == 7);
  CHECK(json_number(json, "i", "f") == 7.0);
  CHECK(json_number_or(json, "f", 0.0, "f") == 2.5);
  CHECK(json_bool_or(json, "b", false, "f"));
  CHECK(json_string_or(json, "s", "", "f") == "x");
  for (const char* key : {"n", "absent"}) {
    CHECK(json_int_or(json, key, -3, "f") == -3);
    CHECK(json_number_or(json, key, 0.5, "f") == 0.5);
    CHECK(json_bool_or(json, key, true, "f"));
    CHECK(json_string_or(json, key, "d", "f") == "d");
    CHECK_ERROR(Status::kCorrupt, ({"f: ", key, "missing"}), json_int(json, key, "f"));
    CHECK_ERROR(Status::kCorrupt, ({"f: ", key, "missing"}), json_number(json, key, "f"));
  }
  CHECK_ERROR(Status::kCorrupt, ({"'f'", "integer"}), json_int(json, "f", "f"));
  CHECK_ERROR(Status::kCorrupt, ({"'big'", "range"}), json_int(json, "big", "f"));
  CHECK_ERROR(Status::kCorrupt, ({"'b'", "integer"}), json_int_or(json, "b", 1, "f"));
  CHECK_ERROR(Status::kCorrupt, ({"'s'", "number"}), json_number_or(json, "s", 1, "f"));
  CHECK_ERROR(Status::kCorrupt, ({"'i'", "true or false"}), json_bool_or(json, "i", true, "f"));
  CHECK_ERROR(Status::kCorrupt, ({"'i'", "string"}), json_string_or(json, "i", "", "f"));
  CHECK_ERROR(Status::kCorrupt, ({"'i'", "object"}), json_int(parse_json("[]", "f"), "i", "f"));
}

TEST_CASE("json: UTF-8 and printable names") {
  CHECK(is_valid_utf8("a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80"));
  for (const char* bad : {"\x80", "\xC0\x80", "\xC3", "\xE0\x80\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xFF"}) {
    CHECK_FALSE(is_valid_utf8(bad));
  }
  CHECK(printable("a\nb\x7F\xFF\xC3\xA9") == "a?b??\xC3\xA9");
  CHECK(printable("aaa\xC3\xA9", 4) == "aaa...");
  CHECK(printable(std::string(500, 'x')).size() == 203);
}
