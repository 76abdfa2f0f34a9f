// SPDX-License-Identifier: Apache-2.0
// A bar on stderr where that is a terminal, at most ten times a second; silent elsewhere.
#pragma once

#include <cstddef>

namespace moelora_cli {

class Progress {
 public:
  explicit Progress(size_t total);  // 0: unknown
  ~Progress();                      // clears the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void set_total(size_t total) { total_ = total; }
  void show(size_t done, size_t failed, size_t tokens);

 private:
  size_t total_;
  bool terminal_;
  bool shown_ = false;
  double started_ms_;
  double last_ms_ = 0;
};

}  // namespace moelora_cli
