// SPDX-License-Identifier: Apache-2.0
// moelora.h, groups "version, status", "process-wide hooks" and "devices". Version and status functions work
// everywhere, also in a forked child, and touch nothing.
#include <iterator>

#include "kernels/base/device.h"
#include "runtime/api/boundary.h"
#include "runtime/engine/apart.h"
#include "runtime/engine/log.h"
#include "runtime/memory/host_memory.h"
#include "runtime/memory/host_resources.h"

using namespace moelora;
using namespace moelora::api;

#define MOELORA_TEXT_OF(x) #x
#define MOELORA_TEXT(x) MOELORA_TEXT_OF(x)
#define MOELORA_VERSION_TEXT          \
  MOELORA_TEXT(MOELORA_VERSION_MAJOR) \
  "." MOELORA_TEXT(MOELORA_VERSION_MINOR) "." MOELORA_TEXT(MOELORA_VERSION_PATCH)

uint32_t moelora_version(void) {
  return MOELORA_VERSION;
}
const char* moelora_version_string(void) {
  return MOELORA_VERSION_TEXT;
}
uint32_t moelora_abi_version(void) {
  return MOELORA_ABI_VERSION;
}
const char* moelora_build_info(void) {
#ifdef MOELORA_HAVE_CUDA
  return "moelora " MOELORA_VERSION_TEXT "; compiler " __VERSION__ "; backends cpu, cuda";
#else
  return "moelora " MOELORA_VERSION_TEXT "; compiler " __VERSION__ "; backends cpu";
#endif
}

const char* moelora_status_name(moelora_status status) {
  static constexpr const char* kResults[] = {"OK", "TIMEOUT", "END", "ALREADY_DONE", "MORE"};
  static constexpr const char* kErrors[] = {
      "E_INVALID",      "E_HANDLE",         "E_STRUCT_SIZE", "E_ABI",      "E_NOT_FOUND",  "E_EXISTS",
      "E_BUSY",         "E_CLOSED",         "E_CANCELLED",   "E_DEADLINE", "E_OVERLOADED", "E_NOMEM",
      "E_DEVICE_NOMEM", "E_CONTEXT_LENGTH", "E_UNSUPPORTED", "E_CORRUPT",  "E_IO",         "E_ADAPTER_MISMATCH",
      "E_CUDA",         "E_DEVICE_LOST",    "E_NO_DEVICE",   "E_FORKED",   "E_REENTRANT",  "E_OVERRUN",
      "E_INTERNAL"};
  static_assert(std::size(kErrors) == -MOELORA_E_INTERNAL && std::size(kResults) == MOELORA_MORE + 1);
  if (status >= 0 && status <= MOELORA_MORE) {
    return kResults[status];
  }
  if (status < 0 && status >= MOELORA_E_INTERNAL) {
    return kErrors[-status - 1];
  }
  return "unknown";
}

void moelora_struct_init(void* object, size_t size) {
  if (object == nullptr || size < sizeof(uint32_t)) {
    return;
  }
  std::memset(object, 0, size);
  const auto size32 = static_cast<uint32_t>(std::min<size_t>(size, UINT32_MAX));
  std::memcpy(object, &size32, sizeof size32);
}

moelora_status moelora_set_allocator(const moelora_allocator* allocator, moelora_error* err) {
  return guard(err, [&] {
    const moelora_allocator given = read_struct(allocator, "allocator", moelora_allocator{});
    if (given.allocate == nullptr || given.deallocate == nullptr) {
      throw Error(Status::kInvalid, "allocate or deallocate of the allocator is NULL");
    }
    if (!set_host_allocator({given.allocate, given.deallocate, given.user})) {
      throw Error(Status::kBusy, "the library has taken memory already; set the allocator before anything else");
    }
    return Status::kOk;
  });
}

moelora_status moelora_log_set(int32_t level, moelora_log_fn fn, void* user, moelora_error* err) {
  return guard(err, [&] {
    if (level < MOELORA_LOG_NONE || level > MOELORA_LOG_DEBUG) {
      throw Error(Status::kInvalid, fmt::format("log level {} is not 0 to {}", level, int{MOELORA_LOG_DEBUG}));
    }
    set_log(static_cast<LogLevel>(level), fn, user);
    return Status::kOk;
  });
}

moelora_status moelora_log_read(int32_t timeout_ms, char* buf, size_t cap, size_t* n, int32_t* level,
                                moelora_error* err) {
  return guard(err, [&] {
    required(n, "n");
    int32_t found = MOELORA_LOG_NONE;
    if (cap > 0) {
      required(buf, "buf");
    }
    const Status status = read_log(timeout_ms, buf, cap, n, &found);
    if (level != nullptr) {
      *level = found;
    }
    return status;
  });
}

// Device 0 is the CPU, device n GPU n - 1.
static std::vector<DeviceInfo> devices() {
  std::vector<DeviceInfo> found;
#ifdef MOELORA_HAVE_CUDA
  run_apart([&] { found = list_devices_cuda(); });
#endif
  const HostResources host = host_resources();
  found.insert(found.begin(), {host.name, host.memory_bytes, host.memory_free_bytes, host.num_cores, 0});
  return found;
}

moelora_status moelora_device_count(int32_t* count, moelora_error* err) {
  return guard(err, [&] {
    required(count, "count") = static_cast<int32_t>(devices().size());
    return Status::kOk;
  });
}

moelora_status moelora_device_info_get(int32_t device, moelora_device_info* info, moelora_error* err) {
  return guard(err, [&] {
    check_struct(info, "info");
    const std::vector<DeviceInfo> all = devices();
    if (device < 0 || static_cast<size_t>(device) >= all.size()) {
      throw Error(Status::kNoDevice, fmt::format("device {} does not exist; there {} {}, numbered from 0", device,
                                                 all.size() == 1 ? "is" : "are", all.size()));
    }
    const DeviceInfo& one = all[static_cast<size_t>(device)];
    moelora_device_info found = {};
    found.kind = device == 0 ? MOELORA_DEVICE_CPU : MOELORA_DEVICE_CUDA;
    found.memory_bytes = one.memory_bytes;
    found.memory_free_bytes = one.memory_free_bytes;
    found.num_units = one.num_units;
    found.compute_capability = one.compute_capability;
    copy_text(found.name, sizeof found.name, one.name);
    write_struct(info, found);
    return Status::kOk;
  });
}
