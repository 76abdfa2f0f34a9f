// SPDX-License-Identifier: Apache-2.0
// Where the library takes host memory for large and hot objects: the host program's own allocator if it set one,
// else mimalloc through its mi_* functions (opened privately, so that malloc and operator new of the host stay what
// they are), else the C allocator. The choice is made at the first allocation and holds for the life of the process.
// Memory never crosses the C boundary.
#pragma once

#include <cstddef>
#include <memory_resource>

namespace moelora {

struct HostAllocator {
  void* (*allocate)(void* user, size_t size, size_t alignment) = nullptr;
  void (*deallocate)(void* user, void* memory, size_t size, size_t alignment) = nullptr;
  void* user = nullptr;
};

// False if memory was taken already, or an allocator was set before.
[[nodiscard]] bool set_host_allocator(const HostAllocator& allocator);
// The resource over it; allocate throws std::bad_alloc. Never destroyed.
std::pmr::memory_resource* host_memory();
// "mimalloc", "C" or "host"; makes the choice if it was not made yet.
const char* host_memory_name();

}  // namespace moelora
