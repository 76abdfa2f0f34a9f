// SPDX-License-Identifier: Apache-2.0
// Text of an output while it comes: whole code points, and stop strings that are found across the borders of tokens
// and never given out. Against a search of the whole text.
#include "runtime/text/output_text.h"

#include <algorithm>
#include <random>

#include "tests/support/catch.h"
#include "tests/text/tokenizer_files.h"

using namespace moelora;
using namespace moelora::test;

namespace {

std::vector<int32_t> ids_of(const Tokenizer& tokenizer, const std::vector<std::string>& tokens) {
  std::vector<int32_t> ids;
  for (const std::string& token : tokens) {
    for (size_t id = 0;; ++id) {
      REQUIRE(id < tokenizer.num_ids());
      if (tokenizer.token_bytes(static_cast<int32_t>(id)) == token) {
        ids.push_back(static_cast<int32_t>(id));
        break;
      }
    }
  }
  return ids;
}

std::vector<StopString> numbered(const std::vector<std::string>& stops) {
  std::vector<StopString> all;
  for (const std::string& stop : stops) {
    all.push_back({stop, static_cast<int32_t>(all.size())});
  }
  return all;
}

struct Run {
  std::vector<std::string> given;  // after each token, and at the end
  int32_t ended_by = -1;
  size_t num_tokens = 0;  // pushed until the end
  [[nodiscard]] std::string text() const {
    std::string all;
    for (const std::string& part : given) {
      all += part;
    }
    return all;
  }
};

// As an engine does: no token follows the one that completes a stop string.
Run run(const std::shared_ptr<const Tokenizer>& tokenizer, const std::vector<int32_t>& ids,
        const std::vector<std::string>& stops, int32_t min_tokens = 0) {
  OutputText output(tokenizer, numbered(stops), min_tokens);
  Run result;
  const auto take = [&] {
    result.given.emplace_back(output.ready());
    output.take(output.ready().size());
  };
  for (const int32_t id : ids) {
    result.ended_by = output.push(id);
    ++result.num_tokens;
    take();
    if (result.ended_by >= 0) {
      break;
    }
  }
  output.finish();
  take();
  return result;
}

using Parts = std::vector<std::string>;

}  // namespace

TEST_CASE("output text: whole code points, whatever the borders of tokens") {
  const auto tokenizer = open_file(byte_level_file());
  const auto ids = ids_of(*tokenizer, {"a", "\xF0", "\x9F", "\x98", "\x80", "b", "\xC3"});
  CHECK(run(tokenizer, ids, {}).given == Parts{"a", "", "", "", "\xF0\x9F\x98\x80", "b", "", "\xEF\xBF\xBD"});
  const std::string nul(1, '\0');
  CHECK(run(tokenizer, ids_of(*tokenizer, {"a", nul, "b"}), {}).given == Parts{"a", nul, "b", ""});
}

TEST_CASE("output text: a stop string across three tokens is never given out") {
  const auto tokenizer = open_file(byte_level_file());
  const auto ids = ids_of(*tokenizer, {"x", "ab", "c", "abc", "y", "z"});
  const Run ended = run(tokenizer, ids, {"bcab"});
  CHECK(ended.given == Parts{"x", "a", "", "", ""});
  CHECK(ended.ended_by == 0);
  CHECK(ended.num_tokens == 4);  // the third of them completes it; what else it has is dropped
  // A beginning that comes to nothing is given out as soon as that is known.
  CHECK(run(tokenizer, ids, {"bcaba"}).given == Parts{"x", "a", "", "bca", "bcy", "z", ""});
}

TEST_CASE("output text: stop strings at the beginning, at the end, and in code points") {
  const auto tokenizer = open_file(byte_level_file());
  const auto ids = ids_of(*tokenizer, {"ab", "c", "d"});
  CHECK(run(tokenizer, ids, {"a"}).given == Parts{"", ""});
  CHECK(run(tokenizer, ids, {"ab"}).num_tokens == 1);
  CHECK(run(tokenizer, ids, {"d"}).text() == "abc");
  CHECK(run(tokenizer, ids, {"d"}).ended_by == 0);
  CHECK(run(tokenizer, ids, {"cde"}).text() == "abcd");  // held back until the end
  CHECK(run(tokenizer, ids, {"cde"}).ended_by == -1);
  const auto emoji = ids_of(*tokenizer, {"a", "\xF0", "\x9F", "\x98", "\x80", "b"});
  CHECK(run(tokenizer, emoji, {"\xF0\x9F\x98\x80"}).given == Parts{"a", "", "", "", "", ""});
  CHECK(run(tokenizer, emoji, {"\xF0\x9F\x98\x81"}).text() ==
        "a\xF0\x9F\x98\x80"
        "b");
  const std::string nul(1, '\0');
  CHECK(run(tokenizer, ids_of(*tokenizer, {"a", nul, "b"}), {nul + "b"}).text() == "a");
}

TEST_CASE("output text: of overlapping stop strings the first complete one, then the longest") {
  const auto tokenizer = open_file(byte_level_file());
  const auto ids = ids_of(*tokenizer, {"x", "a", "b", "c", "d"});
  const auto ends = [&](const std::vector<std::string>& stops) {
    const Run ended = run(tokenizer, ids, stops);
    return std::pair(ended.ended_by, ended.text());
  };
  CHECK(ends({"abcd", "bc"}) == std::pair(1, std::string("xa")));
  CHECK(ends({"bc", "abc"}) == std::pair(1, std::string("x")));
  CHECK(ends({"c", "c"}) == std::pair(0, std::string("xab")));
  CHECK(run(tokenizer, ids_of(*tokenizer, {"aa", "aa", "b"}), {"aab"}).text() == "aa");
}

TEST_CASE("output text: before min_tokens a stop string is text") {
  const auto tokenizer = open_file(byte_level_file());
  const auto ids = ids_of(*tokenizer, {"a", "b", "a", "b", "c"});
  CHECK(run(tokenizer, ids, {"ab"}, 3).text() == "ab");
  CHECK(run(tokenizer, ids, {"ab"}, 3).num_tokens == 4);
  CHECK(run(tokenizer, ids, {"ab"}, 5).text() == "ababc");
}

TEST_CASE("output text: behind a prompt nothing is taken away") {
  const auto tokenizer = open_file(mark_file());
  const auto ids = tokenizer->encode("ab", {});
  CHECK(tokenizer->decode(ids.data(), ids.size(), false) == "ab");
  CHECK(run(tokenizer, ids, {}).text() == " ab");
  CHECK(run(tokenizer, ids, {" a"}).text().empty());
}

// Everything that no stop string could still begin with is given out at once.
TEST_CASE("output text: as a search of the whole text has it") {
  const auto tokenizer = open_file(byte_level_file());
  const auto pieces = ids_of(*tokenizer, {"a", "b", "c", "ab", "abc", "aa", "aaa", "bc"});
  std::mt19937 random(5);
  for (int round = 0; round < 3000; ++round) {
    std::vector<int32_t> ids(1 + random() % 12);
    std::generate(ids.begin(), ids.end(), [&] { return pieces[random() % pieces.size()]; });
    Parts stops(1 + random() % 3);
    for (std::string& stop : stops) {
      stop.resize(1 + random() % 6);
      std::generate(stop.begin(), stop.end(), [&] { return static_cast<char>('a' + random() % 3); });
    }
    const std::string whole = tokenizer->decode(ids.data(), ids.size(), false);
    size_t end = std::string::npos;
    size_t length = 0;
    for (const std::string& stop : stops) {
      const size_t at = whole.find(stop);
      const size_t its_end = at == std::string::npos ? at : at + stop.size();
      if (its_end < end || (its_end == end && its_end != std::string::npos && stop.size() > length)) {
        end = its_end;
        length = stop.size();
      }
    }
    const Run got = run(tokenizer, ids, stops);
    INFO(whole << " " << stops.front());
    CHECK((got.ended_by >= 0) == (end != std::string::npos));
    CHECK(got.text() == (end == std::string::npos ? whole : whole.substr(0, end - length)));
    if (end != std::string::npos) {
      continue;
    }
    std::string given;
    for (size_t i = 0; i < ids.size(); ++i) {
      given += got.given[i];
      const std::string so_far = tokenizer->decode(ids.data(), i + 1, false);
      const std::string held = so_far.substr(given.size());
      CHECK((held.empty() ||
             std::any_of(stops.begin(), stops.end(), [&](const std::string& stop) { return stop.starts_with(held); })));
    }
  }
}
