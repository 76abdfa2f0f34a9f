// SPDX-License-Identifier: Apache-2.0
// The one exception type of the project and the checks that throw it. Three kinds of trouble, three
// treatments: an expected outcome is a return value; an operating error (bad file, bad argument,
// no memory) is `throw Error` with a message that names the file, tensor, option or limit at fault;
// a broken invariant throws Error{kInternal} through MOELORA_ASSERT in every build, because a library
// inside someone else's process may not abort. Only runtime/api catches.
#pragma once

#include <stdexcept>
#include <string>

namespace moelora {

// The numbers are those of the public header (moelora.h, MOELORA_E_*); frozen.
enum class Status : int {
  kOk = 0,
  kTimeout = 1,
  kEnd = 2,
  kAlreadyDone = 3,
  kMore = 4,
  kInvalid = -1,
  kHandle = -2,
  kStructSize = -3,
  kAbi = -4,
  kNotFound = -5,
  kExists = -6,
  kBusy = -7,
  kClosed = -8,
  kCancelled = -9,
  kDeadline = -10,
  kOverloaded = -11,
  kNomem = -12,
  kDeviceNomem = -13,
  kContextLength = -14,
  kUnsupported = -15,
  kCorrupt = -16,
  kIo = -17,
  kAdapterMismatch = -18,
  kCuda = -19,
  kDeviceLost = -20,
  kNoDevice = -21,
  kForked = -22,
  kReentrant = -23,
  kOverrun = -24,
  kInternal = -25,
};

class Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  [[nodiscard]] Status status() const { return status_; }

 private:
  Status status_;
};

[[noreturn]] void fail_assert(const char* condition, const char* file, int line);

}  // namespace moelora

#define MOELORA_ASSERT(condition) ((condition) ? void(0) : ::moelora::fail_assert(#condition, __FILE__, __LINE__))
