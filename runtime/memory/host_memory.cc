// SPDX-License-Identifier: Apache-2.0
#include "runtime/memory/host_memory.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>

namespace moelora {
namespace {

void* c_allocate(void*, size_t size, size_t alignment) {
  void* memory = nullptr;
  return posix_memalign(&memory, std::max(alignment, sizeof(void*)), size) == 0 ? memory : nullptr;
}
void c_deallocate(void*, void* memory, size_t, size_t) {
  std::free(memory);
}

struct Mimalloc {
  void* (*malloc_aligned)(size_t size, size_t alignment) = nullptr;
  void (*free)(void* memory) = nullptr;
};
void* mi_allocate(void* user, size_t size, size_t alignment) {
  return static_cast<const Mimalloc*>(user)->malloc_aligned(size, alignment);
}
void mi_deallocate(void* user, void* memory, size_t, size_t) {
  static_cast<const Mimalloc*>(user)->free(memory);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kUseMimalloc = false;  // a sanitizer sees only the memory of its own malloc
#else
constexpr bool kUseMimalloc = true;
#endif

// Null where it is not installed. The packaged library overrides malloc when it is linked; RTLD_LOCAL keeps its
// symbols to us.
const Mimalloc* open_mimalloc() {
  static Mimalloc functions;
  if (!kUseMimalloc) {
    return nullptr;
  }
  void* library = dlopen("libmimalloc.so.2", RTLD_LOCAL | RTLD_LAZY);
  if (library == nullptr) {
    return nullptr;
  }
  functions.malloc_aligned = reinterpret_cast<void* (*)(size_t, size_t)>(dlsym(library, "mi_malloc_aligned"));
  functions.free = reinterpret_cast<void (*)(void*)>(dlsym(library, "mi_free"));
  return functions.malloc_aligned != nullptr && functions.free != nullptr ? &functions : nullptr;
}

struct Choice {
  std::mutex mutex;
  bool made = false;
  HostAllocator allocator;
  const char* name = "C";

  void make() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (made) {
      return;
    }
    if (const Mimalloc* functions = open_mimalloc()) {
      allocator = {mi_allocate, mi_deallocate, const_cast<Mimalloc*>(functions)};
      name = "mimalloc";
    } else {
      allocator = {c_allocate, c_deallocate, nullptr};
    }
    made = true;
  }
};

Choice& choice() {
  static Choice* const instance = new Choice;  // never destroyed: threads may outlive main
  return *instance;
}

class HostMemory final : public std::pmr::memory_resource {
 public:
  explicit HostMemory(const HostAllocator& allocator) : allocator_(allocator) {}

 private:
  void* do_allocate(size_t bytes, size_t alignment) override {
    void* memory = allocator_.allocate(allocator_.user, std::max<size_t>(bytes, 1), alignment);
    if (memory == nullptr) {
      throw std::bad_alloc();
    }
    return memory;
  }
  void do_deallocate(void* memory, size_t bytes, size_t alignment) override {
    allocator_.deallocate(allocator_.user, memory, std::max<size_t>(bytes, 1), alignment);
  }
  [[nodiscard]] bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }

  HostAllocator allocator_;
};

constexpr uintptr_t kHugePageBytes = uintptr_t{2} << 20;

}  // namespace

bool set_host_allocator(const HostAllocator& allocator) {
  Choice& chosen = choice();
  const std::lock_guard<std::mutex> lock(chosen.mutex);
  if (chosen.made) {
    return false;
  }
  chosen.allocator = allocator;
  chosen.name = "host";
  chosen.made = true;
  return true;
}

std::pmr::memory_resource* host_memory() {
  static HostMemory* const instance = [] {
    choice().make();
    return new HostMemory(choice().allocator);
  }();
  return instance;
}

void advise_huge_pages(std::byte* memory, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t first = (begin + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  const uintptr_t end = (begin + bytes) / kHugePageBytes * kHugePageBytes;
  if (first < end) {
    ::madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
  }
}

const char* host_memory_name() {
  choice().make();
  return choice().name;
}

}  // namespace moelora
