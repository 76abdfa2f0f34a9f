// SPDX-License-Identifier: Apache-2.0
#include "runtime/memory/host_resources.h"

#include <sched.h>
#include <sys/sysinfo.h>

#include <cstdlib>
#include <fstream>

namespace moelora {
namespace {

// Value of the first line "KEY ... : VALUE" of a file of /proc; empty if there is none.
std::string proc_value(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (line.compare(0, key.size(), key) != 0 || colon == std::string::npos) {
      continue;
    }
    const size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? std::string() : line.substr(begin);
  }
  return {};
}

}  // namespace

HostResources host_resources() {
  HostResources host;
  host.name = proc_value("/proc/cpuinfo", "model name");
  if (host.name.empty()) {
    host.name = "CPU";
  }
  struct sysinfo memory = {};
  if (sysinfo(&memory) == 0) {
    host.memory_bytes = uint64_t{memory.totalram} * memory.mem_unit;
    host.memory_free_bytes = uint64_t{memory.freeram} * memory.mem_unit;
  }
  // Unlike sysinfo's figure this one counts the page cache that can be dropped.
  const uint64_t available_kib = std::strtoull(proc_value("/proc/meminfo", "MemAvailable").c_str(), nullptr, 10);
  if (available_kib > 0) {
    host.memory_free_bytes = available_kib * 1024;
  }
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) {
    host.num_cores = CPU_COUNT(&cores);
  }
  return host;
}

}  // namespace moelora
