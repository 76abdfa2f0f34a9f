// SPDX-License-Identifier: Apache-2.0
// Bad input must give an Error of a given status whose message names the fault and its place. Any other outcome,
// another exception included, comes back as a text for the test to show.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "kernels/base/error.h"

namespace moelora::test {

// Empty when `action` throws Error{status} with every one of `parts` in its message; else what happened instead.
template <class Action>
std::string error_mismatch(Status status, const std::vector<std::string>& parts, const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    const std::string message = error.what();
    if (error.status() != status) {
      return "status " + std::to_string(static_cast<int>(error.status())) + ": " + message;
    }
    for (const std::string& part : parts) {
      if (message.find(part) == std::string::npos) {
        return "'" + part + "' is not in: " + message;
      }
    }
    return "";
  } catch (const std::exception& error) {
    return std::string("another exception: ") + error.what();
  }
  return "nothing was thrown";
}

}  // namespace moelora::test

#define CHECK_ERROR(status, parts, action) \
  CHECK(::moelora::test::error_mismatch(status, std::vector<std::string> parts, [&] { action; }) == "")
