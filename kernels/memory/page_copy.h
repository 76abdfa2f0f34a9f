// SPDX-License-Identifier: Apache-2.0
// page_copy: moves bytes between host memory and pool pages, and between pages.
// copy_pages: pages[to[i]] = pages[from[i]]; all pairs distinct. write_pages: a host byte stream of `bytes` into
// pages in order; the tail of the last page is left as it was. read_pages: the same bytes back to the host. On CUDA the
// copy is queued: page-locked host memory must stay until the stream has done it, any other is done with on return.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/stream.h"

namespace moelora {

struct CopyPagesArgs {
  std::byte* pool = nullptr;
  int64_t page_bytes = 0;
  const int32_t* from = nullptr;
  const int32_t* to = nullptr;
  int32_t num_pages = 0;
};

struct WritePagesArgs {
  std::byte* pool = nullptr;
  int64_t page_bytes = 0;
  const std::byte* source = nullptr;  // host
  int64_t bytes = 0;
  const int32_t* pages = nullptr;  // [ceil(bytes / page_bytes)]
};

struct ReadPagesArgs {
  const std::byte* pool = nullptr;
  int64_t page_bytes = 0;
  std::byte* target = nullptr;  // host
  int64_t bytes = 0;
  const int32_t* pages = nullptr;  // [ceil(bytes / page_bytes)]
};

void copy_pages_cpu(const CopyPagesArgs& args, Stream& stream);
void write_pages_cpu(const WritePagesArgs& args, Stream& stream);
void read_pages_cpu(const ReadPagesArgs& args, Stream& stream);
void copy_pages_cuda(const CopyPagesArgs& args, Stream& stream);    // from, to: device memory
void write_pages_cuda(const WritePagesArgs& args, Stream& stream);  // pages: host memory, free on return
void read_pages_cuda(const ReadPagesArgs& args, Stream& stream);    // as write_pages_cuda

}  // namespace moelora
