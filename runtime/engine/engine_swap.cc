// SPDX-License-Identifier: Apache-2.0
// The copies of preempted sequences' KV between pool and host memory, and the rates by which the scheduler decides
// whether they pay. Engine thread.
#include <algorithm>

#include "runtime/engine/engine_parts.h"

namespace moelora {
namespace {

// Until one was measured on the CPU; on a GPU the copies run beside the host and are not timed: what a bus of today
// gives to pages of 128 KiB, with something to spare.
constexpr double kSwapBytesPerMsHost = 3e6;
constexpr double kSwapBytesPerMsGpu = 3e7;

// What was seen at best, forgotten slowly: the machine may have become slower.
double best_of(double best, double seen) {
  return best == 0 || seen > best ? seen : best + (seen - best) / 64;
}

}  // namespace

// Queued behind the last step's ops and before this one's, which may write to the pages. Places in host memory that
// follow each other are one copy.
void Engine::Parts::swap_pages() {
  if (batch_.swaps_out.pages.empty() && batch_.swaps_in.pages.empty()) {
    return;
  }
  const auto each_run = [&](const PageMoves& moves, const auto& copy) {
    for (size_t begin = 0, end = 0; begin < moves.places.size(); begin = end) {
      end = begin + 1;
      while (end < moves.places.size() && moves.places[end] == moves.places[end - 1] + 1) {
        ++end;
      }
      copy(swap_space->place(moves.places[begin]), static_cast<int64_t>(end - begin) * geometry.page_bytes,
           moves.pages.data() + begin);
    }
  };
  const double start = now_ms();
  each_run(batch_.swaps_out, [&](std::byte* host, int64_t bytes, const PageId* pages) {
    kernels->read_pages({pool->base(), geometry.page_bytes, host, bytes, pages}, *stream);
  });
  each_run(batch_.swaps_in, [&](const std::byte* host, int64_t bytes, const PageId* pages) {
    kernels->write_pages({pool->base(), geometry.page_bytes, host, bytes, pages}, *stream);
  });
  if (device->is_host()) {
    const auto pages = static_cast<double>(batch_.swaps_out.pages.size() + batch_.swaps_in.pages.size());
    const double ms = std::max(now_ms() - start, 1e-6);
    const std::lock_guard<std::mutex> lock(mutex);
    SchedulerRates& rates = scheduler->rates();
    rates.swap_bytes_per_ms = best_of(rates.swap_bytes_per_ms, pages * static_cast<double>(geometry.page_bytes) / ms);
  }
  if (batch_.entries.empty()) {
    device->synchronize(*stream);  // else the step does
  }
}

// A step of prompts counts if it is large enough to show the rate, or shows a better one.
void Engine::Parts::note_rates(double ms) {
  SchedulerRates& rates = scheduler->rates();
  if (rates.swap_bytes_per_ms == 0) {
    rates.swap_bytes_per_ms = device->is_host() ? kSwapBytesPerMsHost : kSwapBytesPerMsGpu;
  }
  if (ms <= 0 || batch_.num_rows == 0) {
    return;
  }
  if (batch_.num_prefill_rows == 0) {
    rates.decode_step_ms = rates.decode_step_ms == 0 ? ms : 1.0 / best_of(1.0 / rates.decode_step_ms, 1.0 / ms);
    return;
  }
  const double rate = batch_.num_prefill_rows / ms;
  if (2 * batch_.num_prefill_rows >= info.max_batch_tokens || rate > rates.prefill_rows_per_ms) {
    rates.prefill_rows_per_ms = best_of(rates.prefill_rows_per_ms, rate);
  }
}

}  // namespace moelora
