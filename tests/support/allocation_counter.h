// SPDX-License-Identifier: Apache-2.0
// Counts heap allocations of the whole program, all threads: operator new in every build, malloc, calloc and realloc
// too where no sanitizer owns them. A test that includes this needs a binary of its own with allocation_counter.cc,
// which replaces the program's allocator.
#pragma once

namespace moelora::test {

void start_counting_allocations();
// Allocations since the start.
int stop_counting_allocations();

template <class Op>
int allocations_of(const Op& op) {
  start_counting_allocations();
  op();
  return stop_counting_allocations();
}

}  // namespace moelora::test
