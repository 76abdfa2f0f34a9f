// SPDX-License-Identifier: Apache-2.0
#include "runtime/api/boundary.h"

#include <unistd.h>

#include <atomic>
#include <cmath>
#include <mutex>

#include "runtime/engine/log.h"

namespace moelora::api {
namespace {

constexpr uint32_t kErrorFirstSize = 512;  // moelora_error of 0.1; frozen
static_assert(sizeof(moelora_error) >= kErrorFirstSize);

constinit std::atomic<pid_t> owner_process{0};
constinit std::mutex claim_mutex;
constinit int64_t num_claims = 0;  // engines made or being made

// Length of the valid UTF-8 sequence at `text`, 0 if there is none.
size_t sequence_length(const unsigned char* text, size_t available) noexcept {
  const unsigned char lead = text[0];
  if (lead < 0x80) {
    return 1;
  }
  const size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || available < length) {
    return 0;
  }
  for (size_t i = 1; i < length; ++i) {
    if ((text[i] & 0xc0) != 0x80) {
      return 0;
    }
  }
  // Overlong forms, surrogates, beyond U+10FFFF.
  if ((lead == 0xe0 && text[1] < 0xa0) || (lead == 0xed && text[1] > 0x9f)) {
    return 0;
  }
  if ((lead == 0xf0 && text[1] < 0x90) || (lead == 0xf4 && text[1] > 0x8f)) {
    return 0;
  }
  return length;
}

// Copies whole code points that fit before `capacity`; bytes that are not UTF-8 become '?'.
size_t copy_utf8(char* field, size_t capacity, const char* text, size_t size) noexcept {
  const auto* bytes = reinterpret_cast<const unsigned char*>(text);
  size_t at = 0;
  size_t out = 0;
  while (at < size) {
    const size_t length = sequence_length(bytes + at, size - at);
    const size_t step = std::max<size_t>(length, 1);
    if (out + step >= capacity) {
      break;
    }
    if (length == 0) {
      field[out] = '?';
    } else {
      std::memcpy(field + out, text + at, step);
    }
    out += step;
    at += step;
  }
  return out;
}

uint32_t error_flags(Status status, bool request_failed) noexcept {
  uint32_t flags = request_failed ? MOELORA_ERROR_FATAL_REQUEST : 0;
  if (status == Status::kOverloaded || (!request_failed && (status == Status::kBusy || status == Status::kNomem))) {
    flags |= MOELORA_ERROR_RETRIABLE;
  }
  if (status == Status::kDeviceLost) {
    flags |= MOELORA_ERROR_FATAL_ENGINE;
  }
  return flags;
}

}  // namespace

bool in_forked_child() noexcept {
  const pid_t owner = owner_process.load(std::memory_order_relaxed);
  return owner != 0 && owner != getpid();
}

ProcessClaim::ProcessClaim() noexcept {
  const std::lock_guard<std::mutex> lock(claim_mutex);
  ++num_claims;
  owner_process.store(getpid());
}

ProcessClaim::~ProcessClaim() {
  if (kept_) {
    return;
  }
  const std::lock_guard<std::mutex> lock(claim_mutex);
  if (--num_claims == 0) {
    owner_process.store(0);
  }
}

Status enter(const moelora_error* err, const char** why) noexcept {
  if (err != nullptr && (err->struct_size < kErrorFirstSize || err->struct_size > kStructSizeMax)) {
    return Status::kStructSize;
  }
  if (in_forked_child()) {
    *why = "this process is a fork of the one that created an engine; only exec is possible here";
    return Status::kForked;
  }
  if (in_log_callback()) {
    *why = "called from inside the log callback";
    return Status::kReentrant;
  }
  return Status::kOk;
}

moelora_status report(moelora_error* err, Status status, const char* message, bool request_failed) noexcept {
  if (err != nullptr) {
    err->status = static_cast<int32_t>(status);
    err->cuda_code = 0;
    err->flags = error_flags(status, request_failed);
    // A larger struct of a newer host has a message of the same size at the same place.
    const size_t length = copy_utf8(err->message, sizeof err->message, message, std::strlen(message));
    err->message[length] = '\0';
  }
  return static_cast<moelora_status>(status);
}

void copy_text(char* field, size_t capacity, const std::string& text) noexcept {
  std::memset(field, 0, capacity);
  copy_utf8(field, capacity, text.data(), text.size());
}

bool valid_utf8(const std::string& text) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
  for (size_t at = 0; at < text.size();) {
    const size_t length = sequence_length(bytes + at, text.size() - at);
    if (length == 0) {
      return false;
    }
    at += length;
  }
  return true;
}

std::string text_argument(const char* what, const char* text, size_t length, size_t max_bytes) {
  if (text == nullptr) {
    if (length == 0) {
      return {};
    }
    throw Error(Status::kInvalid, fmt::format("{} is NULL", what));
  }
  const size_t size = length == MOELORA_STRLEN ? strnlen(text, max_bytes + 1) : length;
  if (size > max_bytes) {
    throw Error(Status::kInvalid, fmt::format("{} has more than {} bytes", what, max_bytes));
  }
  return {text, size};
}

std::string path_argument(const char* what, const char* text, size_t length) {
  std::string path = text_argument(what, text, length, 4096);
  if (path.empty()) {
    throw Error(Status::kInvalid, fmt::format("{} is empty", what));
  }
  if (path.find('\0') != std::string::npos) {
    throw Error(Status::kInvalid, fmt::format("{} has a NUL byte", what));
  }
  return path;
}

std::string name_argument(const char* what, const char* text, size_t length) {
  std::string name = path_argument(what, text, length);
  if (name.size() > 255) {
    throw Error(Status::kInvalid, fmt::format("{} has more than 255 bytes", what));
  }
  if (!valid_utf8(name)) {
    throw Error(Status::kInvalid, fmt::format("{} is not valid UTF-8", what));
  }
  return name;
}

float finite_scale(float scale) {
  if (!std::isfinite(scale)) {
    throw Error(Status::kInvalid, fmt::format("scale is {}; it must be finite", scale));
  }
  return scale;
}

void known_flags(uint32_t flags, uint32_t known) {
  if ((flags & ~known) == 0) {
    return;
  }
  throw Error(Status::kInvalid, fmt::format("unknown flags {:#x}", flags & ~known));
}

}  // namespace moelora::api
