// SPDX-License-Identifier: Apache-2.0
// Where the library takes host memory for large and hot objects: the host program's own allocator if it set one,
// else mimalloc through its mi_* functions (opened privately, so that malloc and operator new of the host stay what
// they are), else the C allocator. The choice is made at the first allocation and holds for the life of the process.
// Memory never crosses the C boundary.
#pragma once

#include <cstddef>
#include <memory_resource>
#include <new>
#include <utility>
#include <vector>

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

// Asks the system to back the whole huge pages inside with huge pages, before they are touched: faults of 4 KiB pages
// take longer than filling them. No effect but on speed, and none on small memory.
void advise_huge_pages(std::byte* memory, size_t bytes);

// Bytes in host_memory() that nobody writes before they are of use: `resize` leaves what the memory held, since filling
// a gigabyte with zeros takes longer than filling it with an adapter.
template <class T>
struct UninitializedAllocator {
  using value_type = T;
  static constexpr size_t kAlignment = 64;
  [[nodiscard]] T* allocate(size_t count) {
    return static_cast<T*>(host_memory()->allocate(count * sizeof(T), kAlignment));
  }
  void deallocate(T* memory, size_t count) noexcept {
    host_memory()->deallocate(memory, count * sizeof(T), kAlignment);
  }
  template <class U>
  void construct(U* element) noexcept {
    ::new (static_cast<void*>(element)) U;
  }
  template <class U, class... Args>
  void construct(U* element, Args&&... args) {
    ::new (static_cast<void*>(element)) U(std::forward<Args>(args)...);
  }
  bool operator==(const UninitializedAllocator&) const = default;
};
using HostBytes = std::vector<std::byte, UninitializedAllocator<std::byte>>;

}  // namespace moelora
