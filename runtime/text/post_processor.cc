// SPDX-License-Identifier: Apache-2.0
#include "runtime/text/post_processor.h"

#include <fmt/format.h>

#include "runtime/text/bpe.h"

namespace moelora {

PostProcessor::PostProcessor(const JsonField& field) {
  if (!field.is_null()) {
    add(field);
  }
}

void PostProcessor::add(const JsonField& field) {
  const std::string& type = field.type();
  if (type == "Sequence") {
    const JsonField parts = field.member("processors");
    for (size_t i = 0; i < parts.size(); ++i) {
      add(parts.element(i));
    }
  } else if (type == "TemplateProcessing") {
    if (has_template_) {
      field.fail(Status::kUnsupported, "a second template is not supported");
    }
    add_template(field);
  } else if (type != "ByteLevel") {  // that one only moves offsets
    field.member("type").fail_unsupported(type);
  }
}

void PostProcessor::add_template(const JsonField& field) {
  const JsonField items = field.member("single");
  const JsonField tokens = field.member("special_tokens");
  bool text_seen = false;
  for (size_t i = 0; i < items.size(); ++i) {
    const JsonField item = items.element(i);
    if (const JsonField sequence = item.member("Sequence"); !sequence.is_null()) {
      if (text_seen) {
        sequence.fail(Status::kUnsupported, "the text twice is not supported");
      }
      text_seen = true;
      continue;
    }
    const std::string& id = item.member("SpecialToken").member("id").text();
    const JsonField ids = tokens.member(id).member("ids");
    for (size_t k = 0; k < ids.size(); ++k) {
      (text_seen ? behind_ : before_).push_back(ids.element(k).integer(0, kTokenIdMax));
    }
  }
  if (!text_seen) {
    items.fail(Status::kCorrupt, "has no Sequence: the text itself is missing");
  }
  has_template_ = true;
}

}  // namespace moelora
