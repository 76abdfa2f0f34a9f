// SPDX-License-Identifier: Apache-2.0
// See demo_page.h.
#include "samples/demo_page.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>

namespace demo {
namespace {

constexpr size_t kColumns = 100, kNameColumns = 14;
int checks = 0, failed = 0;

// Characters, not bytes: what begins one.
size_t width(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

// The end of a text, in one line.
std::string last_characters(std::string text, size_t count) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  while (width(text) > count) {
    text.erase(0, 1);
  }
  while (!text.empty() && (text[0] & 0xC0) == 0x80) {
    text.erase(0, 1);  // what is left of a character
  }
  return text;
}

// Cuts a line after at most `columns` characters, between words where it can.
std::vector<std::string> wrapped(const std::string& line, size_t columns) {
  std::vector<std::string> lines(1);
  size_t at = 0;
  while (at < line.size()) {
    const size_t end = std::min(line.find(' ', at + 1), line.size());
    std::string word = line.substr(at, end - at);  // with the space before it
    if (width(lines.back()) + width(word) > columns && !lines.back().empty()) {
      lines.emplace_back();
      word.erase(0, word[0] == ' ' ? 1 : 0);
    }
    lines.back() += word;
    at = end;
  }
  return lines;
}

}  // namespace

void say(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vprintf(format, arguments);
  va_end(arguments);
  std::printf("\n");
  std::fflush(stdout);
}

void note(const std::string& name, const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::fputs(beside(name, text).c_str(), stdout);
  std::fflush(stdout);
}

void title(const std::string& text) {
  say("\n== %s", text.c_str());
}

std::string beside(const std::string& name, const std::string& text) {
  std::string page;
  std::string margin = "  " + name + std::string(kNameColumns - std::min(kNameColumns, width(name)), ' ');
  size_t at = 0;
  while (at <= text.size()) {
    const size_t end = std::min(text.find('\n', at), text.size());
    for (const std::string& line : wrapped(text.substr(at, end - at), kColumns - 2 - kNameColumns)) {
      page += margin + line + "\n";
      margin.assign(2 + kNameColumns, ' ');
    }
    at = end + 1;
  }
  return page;
}

void Growing::erase() {
  if (lines_ > 0) {
    std::printf("\033[%zuA\033[J", lines_);  // up to where they begin, and clear from there
    lines_ = 0;
  }
}

void Growing::draw(const std::vector<Story>& stories) {
  winsize window{};
  if (isatty(STDOUT_FILENO) == 0 || ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) != 0 || window.ws_col < kColumns ||
      window.ws_row <= stories.size()) {
    return;
  }
  erase();
  for (const Story& story : stories) {
    std::fputs(beside(story.name, "..." + last_characters(story.text, kColumns - 6 - kNameColumns)).c_str(), stdout);
  }
  std::fflush(stdout);
  lines_ = stories.size();
}

void Growing::finish(const std::vector<Story>& stories) {
  erase();
  for (const Story& story : stories) {
    std::fputs(beside(story.name, "..." + story.text).c_str(), stdout);
  }
  std::fflush(stdout);
}

void chart(const std::vector<Story>& stories) {
  constexpr uint64_t kBar = 66;
  uint64_t begin = UINT64_MAX, end = 0;
  for (const Story& story : stories) {
    begin = std::min(begin, story.first_step);
    end = std::max(end, story.last_step);
  }
  const uint64_t steps = std::max<uint64_t>(end - begin, 1);
  say("  %-14s%4s  steps 0 to %llu", "", "tok.", static_cast<unsigned long long>(steps));
  for (const Story& story : stories) {
    const uint64_t from = (story.first_step - begin) * kBar / steps;
    const uint64_t to = std::max((story.last_step - begin) * kBar / steps, from + 1);
    const bool left = story.result.finish_reason == MOELORA_FINISH_CANCELLED;
    say("  %-14s%4zu  %s%s%s", story.name.c_str(), story.tokens.size(), std::string(from, ' ').c_str(),
        std::string(to - from, '=').c_str(), left ? "x cancelled" : "");
  }
}

void expect(bool holds, const std::string& what) {
  ++checks;
  failed += holds ? 0 : 1;
  std::fputs(beside(holds ? "holds:" : "FAILED:", what).c_str(), stdout);
}

int num_checks() {
  return checks;
}

int num_failed() {
  return failed;
}

size_t first_difference(const Story& one, const Story& other) {
  const size_t length = std::min(one.tokens.size(), other.tokens.size());
  size_t at = 0;
  while (at < length && one.tokens[at] == other.tokens[at]) {
    ++at;
  }
  return at;
}

bool same(const Story& one, const Story& other) {
  if (one.leave_after == 0 && other.leave_after == 0) {
    return one.tokens == other.tokens && one.text == other.text;
  }
  const size_t bytes = std::min(one.text.size(), other.text.size());
  return first_difference(one, other) == std::min(one.tokens.size(), other.tokens.size()) &&
         one.text.compare(0, bytes, other.text, 0, bytes) == 0;
}

}  // namespace demo
