// SPDX-License-Identifier: Apache-2.0
// Work on a thread of its own: what a GPU's library keeps per thread (current device, last error) stays the host's.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <exception>
#include <thread>

namespace moelora {

// Runs `task` on a new thread that blocks all signals and waits for it; what it throws is thrown here.
template <class Task>
void run_apart(const Task& task) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::exception_ptr failure;
  try {
    std::thread thread([&] {
      try {
        task();
      } catch (...) {
        failure = std::current_exception();
      }
    });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    thread.join();
  } catch (...) {  // no thread could be started
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  if (failure != nullptr) {
    std::rethrow_exception(failure);
  }
}

}  // namespace moelora
