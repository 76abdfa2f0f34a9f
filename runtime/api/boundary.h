// SPDX-License-Identifier: Apache-2.0
// The border between C and C++: `guard` is the one place that catches. Every exported function that can fail is
// `return guard(err, [&] { ... })`: the body checks its arguments with the functions below, throws Error, and returns
// a Status. Nothing here knows an engine.
#pragma once

#include <cxxabi.h>
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include <fmt/format.h>

#include "include/moelora.h"
#include "include/moelora_experimental.h"
#include "kernels/base/error.h"

namespace moelora::api {

// The failure of a request, as opposed to that of the call that reports it.
class RequestError : public Error {
 public:
  using Error::Error;
};

// kOk, or why nothing may be done: error struct of a wrong size, inside the log callback, in a forked child.
Status enter(const moelora_error* err, const char** why) noexcept;
// Fills the caller's struct (may be null) and returns the number.
moelora_status report(moelora_error* err, Status status, const char* message, bool request_failed) noexcept;

// The process that has engines; a child of it may not use the library.
bool in_forked_child() noexcept;
// Marks this process as one that has engines while an engine is being made; `keep` once it is there. A process whose
// only attempts failed is not marked: its children may make their own.
class ProcessClaim {
 public:
  ProcessClaim() noexcept;
  ~ProcessClaim();
  ProcessClaim(const ProcessClaim&) = delete;
  ProcessClaim& operator=(const ProcessClaim&) = delete;
  void keep() noexcept { kept_ = true; }

 private:
  bool kept_ = false;
};

template <class Body>
moelora_status guard(moelora_error* err, const Body& body) {
  const char* why = nullptr;
  if (const Status refused = enter(err, &why); refused != Status::kOk) {
    return report(refused == Status::kStructSize ? nullptr : err, refused, why, false);
  }
  try {
    return static_cast<moelora_status>(body());
  } catch (const RequestError& error) {
    return report(err, error.status(), error.what(), true);
  } catch (const Error& error) {
    return report(err, error.status(), error.what(), false);
  } catch (const std::bad_alloc&) {
    return report(err, Status::kNomem, "out of host memory", false);
  } catch (const std::length_error&) {
    return report(err, Status::kNomem, "out of host memory: a size beyond the address space", false);
  } catch (const std::exception& error) {
    return report(err, Status::kInternal, error.what(), false);
  } catch (...) {
    // No C++ exception: pthread_cancel unwinds the host's thread, and swallowing that would abort the process.
    if (abi::__cxa_current_exception_type() == nullptr) {
      throw;
    }
    return report(err, Status::kInternal, "unknown exception", false);
  }
}

// Bytes given as (pointer, length); MOELORA_STRLEN and NULL with 0 as the header says.
std::string text_argument(const char* what, const char* text, size_t length, size_t max_bytes);
// A text that is not empty and has no NUL.
std::string path_argument(const char* what, const char* text, size_t length);
// The same, valid UTF-8, at most 255 bytes.
std::string name_argument(const char* what, const char* text, size_t length);
bool valid_utf8(const std::string& text);

template <class T>
T& required(T* pointer, const char* what) {
  if (pointer == nullptr) {
    throw Error(Status::kInvalid, std::string(what) + " is NULL");
  }
  return *pointer;
}

float finite_scale(float scale);
void known_flags(uint32_t flags, uint32_t known);

// Size of a struct in the release that introduced it: smaller ones were never initialised. Frozen.
template <class T>
constexpr uint32_t kFirstSize = 0;
template <>
inline constexpr uint32_t kFirstSize<moelora_allocator> = 32;
template <>
inline constexpr uint32_t kFirstSize<moelora_device_info> = 128;
template <>
inline constexpr uint32_t kFirstSize<moelora_memory_plan> = 104;
template <>
inline constexpr uint32_t kFirstSize<moelora_engine_info> = 288;
template <>
inline constexpr uint32_t kFirstSize<moelora_adapter_info> = 96;
template <>
inline constexpr uint32_t kFirstSize<moelora_session_info> = 48;
template <>
inline constexpr uint32_t kFirstSize<moelora_sampling> = 64;
template <>
inline constexpr uint32_t kFirstSize<moelora_chunk> = 16;
template <>
inline constexpr uint32_t kFirstSize<moelora_result> = 80;
template <>
inline constexpr uint32_t kFirstSize<moelora_stats> = 208;
template <>
inline constexpr uint32_t kFirstSize<moelora_adapter_stats> = 40;
constexpr uint32_t kStructSizeMax = 1u << 16;

template <class T>
void check_struct(const T* object, const char* what) {
  static_assert(kFirstSize<T> >= sizeof(uint32_t) && sizeof(T) >= kFirstSize<T>);
  const uint32_t size = required(object, what).struct_size;
  if (size >= kFirstSize<T> && size <= kStructSizeMax) {
    return;
  }
  throw Error(Status::kStructSize, fmt::format("struct_size of {} is {}; call its init macro first", what, size));
}

// A copy whose tail, if the caller's struct is older, has the values of `initial`.
template <class T>
T read_struct(const T* object, const char* what, const T& initial) {
  check_struct(object, what);
  T value = initial;
  std::memcpy(&value, object, std::min<size_t>(object->struct_size, sizeof(T)));
  value.struct_size = sizeof(T);
  return value;
}

template <class T>
void write_struct(T* object, T value) {
  value.struct_size = object->struct_size;
  std::memcpy(object, &value, std::min<size_t>(object->struct_size, sizeof(T)));
}

// NUL-terminated, cut at a code point, the rest zero.
void copy_text(char* field, size_t capacity, const std::string& text) noexcept;

// The two-step outputs of the header: kMore, and nothing copied, if it does not fit.
template <class T>
Status copy_out(const T* items, size_t count, T* buffer, size_t capacity, size_t* n) {
  required(n, "n") = count;
  if (count > capacity) {
    return Status::kMore;
  }
  if (count > 0) {
    std::copy_n(items, count, &required(buffer, "buf"));
  }
  return Status::kOk;
}

}  // namespace moelora::api
