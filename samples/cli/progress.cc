// SPDX-License-Identifier: Apache-2.0
// See progress.h.
#include "samples/cli/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "samples/cli/host.h"

namespace moelora_cli {
namespace {
constexpr size_t kWidth = 30;
constexpr double kIntervalMs = 100;
}  // namespace

Progress::Progress(size_t total) : total_(total), terminal_(isatty(STDERR_FILENO) == 1), started_ms_(now_ms()) {}

Progress::~Progress() {
  if (shown_) {
    std::fputs("\r\033[K", stderr);
  }
}

void Progress::show(size_t done, size_t failed, size_t tokens) {
  const double now = now_ms();
  if (!terminal_ || now - last_ms_ < kIntervalMs) {
    return;
  }
  last_ms_ = now;
  shown_ = true;
  const size_t filled = total_ == 0 ? 0 : std::min(kWidth, kWidth * done / total_);
  const std::string bar = std::string(filled, '#') + std::string(kWidth - filled, '.');
  const std::string of = total_ == 0 ? "" : "/" + std::to_string(total_);
  std::fprintf(stderr, "\r\033[K[%s] %zu%s, %zu failed, %.1f tokens/s", bar.c_str(), done, of.c_str(), failed,
               1e3 * static_cast<double>(tokens) / std::max(now - started_ms_, 1.0));
}

}  // namespace moelora_cli
