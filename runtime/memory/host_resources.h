// SPDX-License-Identifier: Apache-2.0
// What this machine offers to the process, as device_info and plan_memory report it.
#pragma once

#include <cstdint>
#include <string>

namespace moelora {

struct HostResources {
  std::string name;
  uint64_t memory_bytes = 0;
  uint64_t memory_free_bytes = 0;  // what could be taken without swapping
  int32_t num_cores = 1;           // that the process may use
};
HostResources host_resources();

}  // namespace moelora
