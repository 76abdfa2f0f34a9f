// SPDX-License-Identifier: Apache-2.0
// `post_processor` of tokenizer.json: the special tokens around a text. A TemplateProcessing's template for a single
// text is obeyed; without one, add_bos_token and add_eos_token of tokenizer_config.json are.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/text/json_field.h"

namespace moelora {

class PostProcessor {
 public:
  // Throws kCorrupt or kUnsupported, naming the field. Null: nothing around a text.
  explicit PostProcessor(const JsonField& field);

  // False if the file leaves it to tokenizer_config.json.
  [[nodiscard]] bool has_template() const { return has_template_; }
  void set_around(std::vector<int32_t> before, std::vector<int32_t> behind) {
    before_ = std::move(before);
    behind_ = std::move(behind);
  }
  [[nodiscard]] const std::vector<int32_t>& before() const { return before_; }
  [[nodiscard]] const std::vector<int32_t>& behind() const { return behind_; }

 private:
  void add(const JsonField& field);
  void add_template(const JsonField& field);

  bool has_template_ = false;
  std::vector<int32_t> before_;
  std::vector<int32_t> behind_;
};

}  // namespace moelora
