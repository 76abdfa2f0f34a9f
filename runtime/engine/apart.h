// SPDX-License-Identifier: Apache-2.0
// Work on a thread of its own: what a GPU's library keeps per thread (current device, last error) stays the host's.
#pragma once

#include <exception>

#include "kernels/base/thread.h"

namespace moelora {

// Runs `task` on a new thread that blocks all signals and waits for it; what it throws is thrown here.
template <class Task>
void run_apart(const Task& task) {
  std::exception_ptr failure;
  start_thread([&] {
    try {
      task();
    } catch (...) {
      failure = std::current_exception();
    }
  }).join();
  if (failure != nullptr) {
    std::rethrow_exception(failure);
  }
}

}  // namespace moelora
