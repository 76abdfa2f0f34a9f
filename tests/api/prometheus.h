// SPDX-License-Identifier: Apache-2.0
// A strict reader of Prometheus' text exposition format, version 0.0.4, written from its specification: whatever does
// not keep to it, or to the naming conventions for counters and histograms, fails the test.
#pragma once

#include <cctype>
#include <cmath>
#include <cstdlib>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/catch.h"

namespace moelora_host {

using Labels = std::map<std::string, std::string>;

struct Family {
  std::string type, help;
  std::vector<std::pair<Labels, double>> samples;                           // of a histogram: none
  std::map<std::string, std::vector<std::pair<Labels, double>>> histogram;  // _bucket, _sum, _count
};

class PrometheusReader {
 public:
  explicit PrometheusReader(const std::string& text) {
    REQUIRE(!text.empty());
    REQUIRE(text.back() == '\n');
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      INFO("line: " << line);
      read_line(line);
    }
    for (const auto& [name, family] : families_) {
      INFO("family: " << name);
      check(name, family);
    }
  }

  [[nodiscard]] const Family& family(const std::string& name) const {
    INFO("family: " << name);
    REQUIRE(families_.count(name) == 1);
    return families_.at(name);
  }
  // The only sample of a family.
  [[nodiscard]] double value(const std::string& name) const {
    const Family& found = family(name);
    REQUIRE(found.samples.size() == 1);
    return found.samples[0].second;
  }
  // The sample of a family whose label is this.
  [[nodiscard]] double value(const std::string& name, const std::string& label, const std::string& wanted) const {
    for (const auto& [labels, number] : family(name).samples) {
      if (labels.at(label) == wanted) {
        return number;
      }
    }
    FAIL(name << " has no sample with " << label << " = " << wanted);
    return 0;
  }
  [[nodiscard]] const std::map<std::string, Family>& families() const { return families_; }

 private:
  static bool is_name(const std::string& text, bool may_colon) {
    const auto fits = [&](char c, bool first) {
      return c == '_' || (may_colon && c == ':') || std::isalpha(static_cast<unsigned char>(c)) != 0 ||
             (!first && std::isdigit(static_cast<unsigned char>(c)) != 0);
    };
    bool good = !text.empty();
    for (size_t i = 0; i < text.size(); ++i) {
      good = good && fits(text[i], i == 0);
    }
    return good;
  }

  // "# HELP name text" comes first, "# TYPE name type" next, then the family's samples, all together.
  void read_line(const std::string& line) {
    if (line.rfind("# HELP ", 0) == 0) {
      const size_t space = line.find(' ', 7);
      REQUIRE(space != std::string::npos);
      current_ = line.substr(7, space - 7);
      REQUIRE(is_name(current_, true));
      REQUIRE(families_.count(current_) == 0);  // once, and its samples are not scattered
      families_[current_].help = line.substr(space + 1);
      CHECK(!families_[current_].help.empty());
      return;
    }
    REQUIRE(!current_.empty());
    if (line.rfind("# TYPE ", 0) == 0) {
      REQUIRE(line.rfind("# TYPE " + current_ + " ", 0) == 0);
      Family& family = families_[current_];
      REQUIRE(family.type.empty());
      family.type = line.substr(8 + current_.size());
      const std::set<std::string> types = {"counter", "gauge", "histogram"};
      REQUIRE(types.count(family.type) == 1);
      return;
    }
    REQUIRE(line.rfind('#', 0) != 0);
    read_sample(line);
  }

  void read_sample(const std::string& line) {
    Family& family = families_[current_];
    REQUIRE(!family.type.empty());
    size_t at = line.find_first_of("{ ");
    REQUIRE(at != std::string::npos);
    const std::string name = line.substr(0, at);
    Labels labels;
    if (line[at] == '{') {
      read_labels(line, ++at, labels);
    }
    REQUIRE(at < line.size());
    REQUIRE(line[at] == ' ');
    const std::string number = line.substr(at + 1);
    REQUIRE(!number.empty());
    char* end = nullptr;
    const double value = std::strtod(number.c_str(), &end);
    REQUIRE(*end == '\0');
    REQUIRE(std::isfinite(value));
    if (family.type != "histogram") {
      REQUIRE(name == current_);
      for (const auto& [others, other] : family.samples) {
        REQUIRE(others != labels);  // a series once
      }
      family.samples.emplace_back(labels, value);
      return;
    }
    REQUIRE(name.rfind(current_, 0) == 0);
    const std::string part = name.substr(current_.size());
    REQUIRE((part == "_bucket" || part == "_sum" || part == "_count"));
    family.histogram[part].emplace_back(labels, value);
  }

  static void read_labels(const std::string& line, size_t& at, Labels& labels) {
    while (line.at(at) != '}') {
      const size_t equals = line.find('=', at);
      REQUIRE(equals != std::string::npos);
      const std::string name = line.substr(at, equals - at);
      REQUIRE(is_name(name, false));
      REQUIRE(labels.count(name) == 0);
      at = equals + 1;
      REQUIRE(line.at(at) == '"');
      std::string value;
      for (++at; line.at(at) != '"'; ++at) {
        if (line[at] != '\\') {
          value += line[at];
          continue;
        }
        ++at;
        REQUIRE((line.at(at) == '\\' || line[at] == '"' || line[at] == 'n'));
        value += line[at] == 'n' ? '\n' : line[at];
      }
      labels[name] = value;
      ++at;
      REQUIRE((line.at(at) == ',' || line[at] == '}'));
      at += line[at] == ',' ? 1 : 0;
    }
    ++at;
  }

  static void check(const std::string& name, const Family& family) {
    CHECK(!family.type.empty());
    const bool is_total = name.size() > 6 && name.substr(name.size() - 6) == "_total";
    CHECK((family.type == "counter") == is_total);
    for (const auto& [labels, value] : family.samples) {
      CHECK((family.type != "counter" || value >= 0));
    }
    if (family.type != "histogram") {
      return;
    }
    REQUIRE(family.histogram.count("_bucket") == 1);
    REQUIRE(family.histogram.at("_sum").size() == 1);
    REQUIRE(family.histogram.at("_count").size() == 1);
    double bound = -INFINITY, count = 0;
    for (const auto& [labels, value] : family.histogram.at("_bucket")) {
      REQUIRE(labels.count("le") == 1);
      const double le = labels.at("le") == "+Inf" ? INFINITY : std::stod(labels.at("le"));
      CHECK(le > bound);
      CHECK(value >= count);  // cumulative
      bound = le;
      count = value;
    }
    CHECK(bound == INFINITY);
    CHECK(count == family.histogram.at("_count")[0].second);
  }

  std::map<std::string, Family> families_;
  std::string current_;
};

}  // namespace moelora_host
