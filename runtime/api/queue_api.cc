// SPDX-License-Identifier: Apache-2.0
// moelora.h, group "queue".
#include "runtime/api/boundary.h"
#include "runtime/api/handles.h"

using namespace moelora;
using namespace moelora::api;

moelora_status moelora_queue_create(moelora_queue** out, moelora_error* err) {
  return guard(err, [&] {
    required(out, "out");
    *out = add_queue(std::make_shared<CompletionQueue>());
    return Status::kOk;
  });
}

void moelora_queue_destroy(moelora_queue* queue) {
  guard(nullptr, [&] {
    if (const auto found = remove_queue(queue)) {
      found->close();
    }
    return Status::kOk;
  });
}

moelora_status moelora_queue_wait(moelora_queue* queue, int32_t timeout_ms, moelora_event* events, size_t cap,
                                  size_t* n, moelora_error* err) {
  return guard(err, [&] {
    constexpr size_t kBatch = 64;  // through a small array: the host's stack may be small
    const auto found = find_queue(queue);
    required(n, "n");
    if (cap == 0) {
      throw Error(Status::kInvalid, "cap is 0");
    }
    required(events, "events");
    Event batch[kBatch];
    bool closed = false;
    const size_t count = found->wait(timeout_ms, batch, std::min(cap, kBatch), &closed);
    if (closed) {
      throw Error(Status::kClosed, "the queue was destroyed");
    }
    for (size_t i = 0; i < count; ++i) {
      static_assert(static_cast<int>(EventKind::kWake) == MOELORA_EVENT_WAKE);
      events[i] = {static_cast<int32_t>(batch[i].kind), static_cast<int32_t>(batch[i].status), batch[i].handle,
                   batch[i].tag};
    }
    *n = count;
    return count > 0 ? Status::kOk : Status::kTimeout;
  });
}

moelora_status moelora_queue_fd(moelora_queue* queue, int* fd, moelora_error* err) {
  return guard(err, [&] {
    required(fd, "fd") = find_queue(queue)->fd();
    return Status::kOk;
  });
}

moelora_status moelora_queue_wake(moelora_queue* queue, moelora_error* err) {
  return guard(err, [&] {
    find_queue(queue)->wake();
    return Status::kOk;
  });
}
