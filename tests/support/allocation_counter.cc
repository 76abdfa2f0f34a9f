// SPDX-License-Identifier: Apache-2.0
// The replaced allocator; see allocation_counter.h. Kept apart from its users so that compilers see plain calls.
#include "tests/support/allocation_counter.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<bool> counting{false};
std::atomic<int> allocations{0};

void count() {
  if (counting.load(std::memory_order_relaxed)) {
    allocations.fetch_add(1, std::memory_order_relaxed);
  }
}

}  // namespace

namespace moelora::test {

void start_counting_allocations() {
  allocations.store(0);
  counting.store(true);
}

int stop_counting_allocations() {
  counting.store(false);
  return allocations.load();
}

}  // namespace moelora::test

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// glibc keeps the real functions reachable under these names.
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t number, size_t bytes);
void* __libc_realloc(void* memory, size_t bytes);
void* malloc(size_t bytes) {
  count();
  return __libc_malloc(bytes);
}
void* calloc(size_t number, size_t bytes) {
  count();
  return __libc_calloc(number, bytes);
}
void* realloc(void* memory, size_t bytes) {
  count();
  return __libc_realloc(memory, bytes);
}
}
#endif

void* operator new(size_t bytes) {
  count();
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) {
    return memory;
  }
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}
