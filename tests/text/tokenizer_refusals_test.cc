// SPDX-License-Identifier: Apache-2.0
// Malformed and unsupported tokenizer.json files: a status and a message that names the file and the field, no more.
#include <functional>

#include "kernels/base/error.h"
#include "runtime/io/utf8.h"
#include "tests/support/catch.h"
#include "tests/support/expect_error.h"
#include "tests/text/tokenizer_files.h"

using namespace moelora;
using namespace moelora::test;

namespace {

// What opening the file says after `change`.
void open_changed(const std::function<void(Json&)>& change) {
  Json file = byte_level_file();
  change(file);
  open_file(file);
}

Json of_type(const char* type) {
  return {{"type", type}};
}

Json sequence(const char* key, const Json& part) {
  return {{"type", "Sequence"}, {key, Json::array({part})}};
}

}  // namespace

#define CHECK_CHANGED(status, parts, statement) CHECK_ERROR(status, parts, open_changed([](Json& file) { statement; }))

TEST_CASE("refusals: the folder and the text of the file") {
  const TempDir dir;
  CHECK_ERROR(Status::kNotFound, ({dir.path(), "tokenizer.json"}), Tokenizer::open(dir.path()));
  CHECK_ERROR(Status::kIo, ({"absent/tokenizer.json", "cannot open"}), Tokenizer::open(dir.file("absent")));
  CHECK_ERROR(Status::kCorrupt, ({"tokenizer.json", "too early"}), open_text(""));
  CHECK_ERROR(Status::kCorrupt, ({"tokenizer.json", "too early"}), open_text("{\"model\": {"));
  CHECK_ERROR(Status::kCorrupt, ({"tokenizer.json", "must be an object, found array"}), open_text("[]"));
  CHECK_ERROR(Status::kCorrupt, ({"tokenizer.json", "ill-formed UTF-8", "model.vocab"}),
              open_text("{\"model\": {\"vocab\": {\"a\": 0, \"\xFF\": 1}}}"));
  CHECK_ERROR(Status::kCorrupt, ({"tokenizer.json", "64 levels"}), open_text(std::string(99'000'000, '[')));
  CHECK_ERROR(Status::kCorrupt, ({"tokenizer.json", "more than the limit"}), open_text(std::string(110'000'000, '[')));
  CHECK_ERROR(Status::kCorrupt, ({"tokenizer.json", "twice"}),
              open_text(R"({"model": {"vocab": {"a": 0, "a": 1}, "merges": []}})"));
}

TEST_CASE("refusals: the model") {
  CHECK_CHANGED(Status::kCorrupt, ({"tokenizer.json: model", "missing"}), file.erase("model"));
  CHECK_CHANGED(Status::kCorrupt, ({"model.merges", "missing"}), file["model"].erase("merges"));
  CHECK_CHANGED(Status::kCorrupt, ({"model.merges", "list", "found string"}), file["model"]["merges"] = "a b");
  CHECK_CHANGED(Status::kCorrupt, ({"model.merges[1]", "two tokens"}), file["model"]["merges"][1] = "ab");
  CHECK_CHANGED(Status::kCorrupt, ({"model.merges[1]", "two tokens"}), file["model"]["merges"][1] = Json::array({"a"}));
  CHECK_CHANGED(Status::kCorrupt, ({"model.merges[2]", "two tokens"}), file["model"]["merges"][2] = 7);
  CHECK_CHANGED(Status::kCorrupt, ({"model.merges[0]", "'xyz'", "model.vocab"}), file["model"]["merges"][0] = "xyz a");
  CHECK_CHANGED(Status::kCorrupt, ({"model.merges[0]", "'az'", "model.vocab"}), file["model"]["merges"][0] = "a z");
  CHECK_CHANGED(Status::kUnsupported, ({"model.type", "'Unigram'"}), file["model"]["type"] = "Unigram");
  CHECK_CHANGED(Status::kCorrupt, ({"model.type", "string"}), file["model"]["type"] = 3);
  CHECK_CHANGED(Status::kCorrupt, ({"model.vocab", "missing"}), file["model"].erase("vocab"));
  CHECK_CHANGED(Status::kCorrupt, ({"model.vocab", "object"}), file["model"]["vocab"] = Json::array());
  CHECK_CHANGED(Status::kCorrupt, ({"model.vocab", "no token"}), file["model"]["vocab"] = Json::object());
  CHECK_CHANGED(Status::kUnsupported, ({"model.dropout"}), file["model"]["dropout"] = 0.1);
  CHECK_CHANGED(Status::kUnsupported, ({"model.end_of_word_suffix", "</w>"}),
                file["model"]["end_of_word_suffix"] = "</w>");
  CHECK_CHANGED(Status::kCorrupt, ({"model.unk_token", "'<unk>'"}), file["model"]["unk_token"] = "<unk>");
  CHECK_CHANGED(Status::kCorrupt, ({"model.byte_fallback", "true or false"}), file["model"]["byte_fallback"] = 1);
}

TEST_CASE("refusals: ids") {
  for (const Json& id : {Json(-1), Json(1.5), Json("7"), Json(nullptr), Json(int64_t{1} << 40)}) {
    CHECK_ERROR(Status::kCorrupt, ({"tokenizer.json: model.vocab", "'abc'"}),
                open_changed([&](Json& file) { file["model"]["vocab"]["abc"] = id; }));
  }
  CHECK_CHANGED(Status::kCorrupt, ({"model.vocab", "id 5", "'&'", "'abc'"}), file["model"]["vocab"]["abc"] = 5);
  CHECK_CHANGED(Status::kCorrupt, ({"model.vocab", "no token has id 258"}), file["model"]["vocab"]["abc"] = 1000);
  CHECK_CHANGED(Status::kCorrupt, ({"added_tokens[0].id", "integer"}), file["added_tokens"][0].erase("id"));
  CHECK_CHANGED(Status::kCorrupt, ({"added_tokens[0].id", "out of range"}), file["added_tokens"][0]["id"] = -2);
  CHECK_CHANGED(Status::kCorrupt, ({"added_tokens[0].id", "out of range"}),
                file["added_tokens"][0]["id"] = uint64_t{1} << 63);
  CHECK_CHANGED(Status::kCorrupt, ({"added_tokens[0].content", "string"}), file["added_tokens"][0].erase("content"));
  CHECK_CHANGED(Status::kCorrupt, ({"added_tokens", "list"}), file["added_tokens"] = "none");
}

TEST_CASE("refusals: expressions") {
  const auto split = [](const std::string& expression) {
    open_changed([&](Json& file) {
      file["pre_tokenizer"] = sequence(
          "pretokenizers", {{"type", "Split"}, {"pattern", {{"Regex", expression}}}, {"behavior", "Isolated"}});
    });
  };
  const std::string field = "tokenizer.json: pre_tokenizer.pretokenizers[0].pattern.Regex";
  CHECK_ERROR(Status::kCorrupt, ({field, "'(a'", "parenthes"}), split("(a"));
  CHECK_ERROR(Status::kCorrupt, ({field, "'[a'"}), split("[a"));
  CHECK_ERROR(Status::kCorrupt, ({field, "\\p{Nope}"}), split("\\p{Nope}"));
  CHECK_ERROR(Status::kCorrupt, ({field, "1 to"}), split(""));
  CHECK_ERROR(Status::kCorrupt, ({field, "1 to"}), split(std::string(100'000, 'a')));
  CHECK_ERROR(Status::kCorrupt, ({field}), split(std::string(60'000, '(')));
  CHECK_ERROR(Status::kCorrupt, ({field}), split("\\C"));
  CHECK_ERROR(Status::kUnsupported, ({field, "nested classes"}), split("[a[bc]]"));
  CHECK_ERROR(Status::kUnsupported, ({field, "intersections"}), split("[a-z&&b]"));
}

TEST_CASE("refusals: parts of unknown type") {
  CHECK_CHANGED(Status::kUnsupported, ({"tokenizer.json: normalizer.type", "'Lowercase'"}),
                file["normalizer"] = of_type("Lowercase"));
  CHECK_CHANGED(Status::kUnsupported, ({"normalizer.normalizers[0].type", "'Nmt'"}),
                file["normalizer"] = sequence("normalizers", of_type("Nmt")));
  CHECK_CHANGED(Status::kCorrupt, ({"normalizer.type", "missing"}), file["normalizer"] = Json::object());
  CHECK_CHANGED(Status::kCorrupt, ({"normalizer", "object"}), file["normalizer"] = "NFC");
  CHECK_CHANGED(Status::kUnsupported, ({"pre_tokenizer.type", "'Whitespace'"}),
                file["pre_tokenizer"] = of_type("Whitespace"));
  CHECK_CHANGED(
      Status::kUnsupported, ({"pre_tokenizer.behavior", "'Removed'"}),
      file["pre_tokenizer"] = Json::parse(R"({"type":"Split","behavior":"Removed","pattern":{"String":"a"}})"));
  CHECK_CHANGED(Status::kUnsupported, ({"post_processor.type", "'BertProcessing'"}),
                file["post_processor"] = of_type("BertProcessing"));
  CHECK_CHANGED(Status::kUnsupported, ({"decoder.type", "'WordPiece'"}), file["decoder"] = of_type("WordPiece"));
  CHECK_CHANGED(
      Status::kUnsupported, ({"decoder.decoders[0]", "Fuse"}),
      file["decoder"] = sequence("decoders", {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}));
}

TEST_CASE("refusals: templates and the configuration") {
  CHECK_CHANGED(Status::kCorrupt, ({"post_processor.special_tokens.<s>", "object"}),
                file["post_processor"] = Json::parse(R"({"type":"TemplateProcessing","single":[
                    {"SpecialToken":{"id":"<s>"}},{"Sequence":{"id":"A"}}],"special_tokens":{}})"));
  CHECK_CHANGED(Status::kCorrupt, ({"post_processor.single", "Sequence"}),
                file["post_processor"] = Json::parse(R"({"type":"TemplateProcessing","single":[]})"));
  CHECK_CHANGED(Status::kCorrupt, ({"post_processor", "99999"}),
                file["post_processor"] = Json::parse(R"({"type":"TemplateProcessing","single":[
                    {"SpecialToken":{"id":"x"}},{"Sequence":{"id":"A"}}],"special_tokens":{"x":{"ids":[99999]}}})"));
  CHECK_ERROR(Status::kCorrupt, ({"tokenizer_config.json: bos_token", "'<bos>'"}),
              open_file(byte_level_file(), R"({"add_bos_token": true, "bos_token": "<bos>"})"));
  CHECK_ERROR(Status::kCorrupt, ({"tokenizer_config.json: bos_token", "missing"}),
              open_file(byte_level_file(), R"({"add_bos_token": true})"));
  CHECK_ERROR(Status::kCorrupt, ({"tokenizer_config.json"}), open_file(byte_level_file(), "{"));
}
