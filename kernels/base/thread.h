// SPDX-License-Identifier: Apache-2.0
// Threads that leave the signals of the host's process to the host.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace moelora {

// Starts a thread that blocks all signals. Throws std::system_error if none can be started; the caller's signals are
// what they were in either case.
template <class Task>
[[nodiscard]] std::thread start_thread(Task&& task) {
  class AllBlocked {
   public:
    AllBlocked() {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~AllBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    AllBlocked(const AllBlocked&) = delete;
    AllBlocked& operator=(const AllBlocked&) = delete;

   private:
    sigset_t before_;
  };
  const AllBlocked blocked;  // a new thread inherits this
  return std::thread(std::forward<Task>(task));
}

}  // namespace moelora
