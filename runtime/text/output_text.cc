// SPDX-License-Identifier: Apache-2.0
#include "runtime/text/output_text.h"

#include <algorithm>

namespace moelora {
namespace {

constexpr size_t kBytesOfReplacement = 3;  // an ill-formed byte may become a U+FFFD

std::vector<uint32_t> borders_of(const std::string& text) {
  std::vector<uint32_t> borders(text.size() + 1, 0);
  for (size_t i = 1; i < text.size(); ++i) {
    uint32_t length = borders[i];
    while (length > 0 && text[i] != text[length]) {
      length = borders[length];
    }
    borders[i + 1] = text[i] == text[length] ? length + 1 : 0;
  }
  return borders;
}

}  // namespace

OutputText::OutputText(std::shared_ptr<const Tokenizer> tokenizer, const std::vector<StopString>& stops,
                       int32_t min_tokens)
    : tokenizer_(std::move(tokenizer)),
      stream_(tokenizer_->continuation()),
      min_tokens_(static_cast<size_t>(std::max(min_tokens, 0))) {
  size_t longest = 0;
  stops_.reserve(stops.size());
  for (const StopString& stop : stops) {
    stops_.push_back({stop.text, stop.number, borders_of(stop.text), 0});
    longest = std::max(longest, stop.text.size());
  }
  text_.reserve(longest + kBytesOfReplacement * (tokenizer_->max_token_bytes() + 4) + 1);
}

int32_t OutputText::push(int32_t token) {
  ++num_tokens_;
  if (ended_by_ < 0) {
    const size_t before = text_.size();
    stream_.push(token, text_);
    match(before);
  }
  return ended_by_;
}

void OutputText::finish() {
  if (finished_) {
    return;
  }
  finished_ = true;
  if (ended_by_ < 0) {
    const size_t before = text_.size();
    stream_.finish(text_);
    match(before);
  }
  held_ = 0;
}

// Knuth, Morris and Pratt, for each stop string, over the bytes that are new.
void OutputText::match(size_t from) {
  for (size_t at = from; at < text_.size() && !stops_.empty(); ++at) {
    const Stop* longest = nullptr;
    for (Stop& stop : stops_) {
      if (stop.matched == stop.text.size()) {  // it was complete before min_tokens
        stop.matched = stop.borders[stop.matched];
      }
      while (stop.matched > 0 && stop.text[stop.matched] != text_[at]) {
        stop.matched = stop.borders[stop.matched];
      }
      stop.matched += stop.text[stop.matched] == text_[at] ? 1 : 0;
      if (stop.matched == stop.text.size() && (longest == nullptr || stop.text.size() > longest->text.size())) {
        longest = &stop;
      }
    }
    if (longest != nullptr && num_tokens_ >= min_tokens_) {
      ended_by_ = longest->number;
      text_.resize(at + 1 - longest->text.size());
      held_ = 0;
      return;
    }
  }
  held_ = 0;
  for (const Stop& stop : stops_) {
    const bool complete = stop.matched == stop.text.size();
    held_ = std::max<size_t>(held_, complete ? stop.borders[stop.matched] : stop.matched);
  }
}

}  // namespace moelora
