// SPDX-License-Identifier: Apache-2.0
// Page copies on CUDA. copy_pages is one kernel for all pages: a block copies a run of CHUNK bytes of one page, each
// thread with UNROLL 16-byte loads in flight before its stores. write_pages and read_pages queue one copy for each run
// of pages that are neighbours in the pool, since a copy call costs more than a page's time on the bus. Limited by
// memory, and by the bus to the host.
#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/memory/page_copy.h"

namespace moelora {
namespace {

constexpr int THREADS = 256;
constexpr int UNROLL = 4;
constexpr int CHUNK = THREADS * UNROLL;  // units of 16 bytes

__global__ void __launch_bounds__(THREADS)
    copy_kernel(uint4* pool, int64_t page_units, int chunks, const int32_t* from, const int32_t* to) {
  const int page = blockIdx.x / chunks;
  const int64_t begin = static_cast<int64_t>(blockIdx.x % chunks) * CHUNK + threadIdx.x;
  const uint4* source = pool + from[page] * page_units;
  uint4* target = pool + to[page] * page_units;
  uint4 kept[UNROLL];
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    const int64_t at = begin + i * THREADS;
    if (at < page_units) {
      kept[i] = source[at];
    }
  }
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    const int64_t at = begin + i * THREADS;
    if (at < page_units) {
      target[at] = kept[i];
    }
  }
}

// copy(first page, offset of its bytes in the stream, bytes) for each run of pages that are neighbours in the pool.
template <class Copy>
void each_run(const int32_t* pages, int64_t bytes, int64_t page_bytes, const Copy& copy) {
  const int64_t count = (bytes + page_bytes - 1) / page_bytes;
  for (int64_t begin = 0; begin < count;) {
    int64_t end = begin + 1;
    while (end < count && pages[end] == pages[end - 1] + 1) {
      ++end;
    }
    const int64_t offset = begin * page_bytes;
    copy(int64_t{pages[begin]}, offset, (end * page_bytes < bytes ? end * page_bytes : bytes) - offset);
    begin = end;
  }
}

}  // namespace

void copy_pages_cuda(const CopyPagesArgs& args, Stream& stream) {
  MOELORA_ASSERT(args.page_bytes > 0 && args.page_bytes % 16 == 0);
  MOELORA_ASSERT(reinterpret_cast<uintptr_t>(args.pool) % 16 == 0);
  if (args.num_pages == 0) {
    return;
  }
  const int64_t units = args.page_bytes / 16;
  const int64_t chunks = (units + CHUNK - 1) / CHUNK;
  MOELORA_ASSERT(chunks * args.num_pages <= INT32_MAX);
  copy_kernel<<<static_cast<unsigned>(chunks * args.num_pages), THREADS, 0, cuda_stream(stream)>>>(
      reinterpret_cast<uint4*>(args.pool), units, static_cast<int>(chunks), args.from, args.to);
  check_launch("copy_pages");
}

void write_pages_cuda(const WritePagesArgs& args, Stream& stream) {
  each_run(args.pages, args.bytes, args.page_bytes, [&](int64_t page, int64_t offset, int64_t bytes) {
    check_cuda(cudaMemcpyAsync(args.pool + page * args.page_bytes, args.source + offset, static_cast<size_t>(bytes),
                               cudaMemcpyHostToDevice, cuda_stream(stream)),
               "write_pages");
  });
}

void read_pages_cuda(const ReadPagesArgs& args, Stream& stream) {
  each_run(args.pages, args.bytes, args.page_bytes, [&](int64_t page, int64_t offset, int64_t bytes) {
    check_cuda(cudaMemcpyAsync(args.target + offset, args.pool + page * args.page_bytes, static_cast<size_t>(bytes),
                               cudaMemcpyDeviceToHost, cuda_stream(stream)),
               "read_pages");
  });
}

}  // namespace moelora
