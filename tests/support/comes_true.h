// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <thread>

namespace moelora::test {

/// Waits until `condition()` holds; false after a minute, which is longer than a sanitizer on a busy machine needs for
/// what takes milliseconds elsewhere. Returns at once when it holds.
template <class Condition>
bool comes_true(const Condition& condition) {
  const auto begun = std::chrono::steady_clock::now();
  while (!condition()) {
    if (std::chrono::steady_clock::now() - begun > std::chrono::minutes(1)) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace moelora::test
