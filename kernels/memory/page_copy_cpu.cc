// SPDX-License-Identifier: Apache-2.0
// The page copies of every CPU backend: memcpy, a page a task. Pages are at least tens of kilobytes, so the hand-out
// costs nothing beside them.
#include "kernels/memory/page_copy.h"

#include <algorithm>
#include <cstring>

namespace moelora {

void copy_pages_cpu(const CopyPagesArgs& args, Stream& stream) {
  stream.parallel_for(static_cast<size_t>(args.num_pages), [&](size_t i, int) {
    std::memcpy(args.pool + args.to[i] * args.page_bytes, args.pool + args.from[i] * args.page_bytes,
                static_cast<size_t>(args.page_bytes));
  });
}

void write_pages_cpu(const WritePagesArgs& args, Stream& stream) {
  const int64_t pages = (args.bytes + args.page_bytes - 1) / args.page_bytes;
  stream.parallel_for(static_cast<size_t>(pages), [&](size_t i, int) {
    const int64_t offset = static_cast<int64_t>(i) * args.page_bytes;
    std::memcpy(args.pool + args.pages[i] * args.page_bytes, args.source + offset,
                static_cast<size_t>(std::min(args.page_bytes, args.bytes - offset)));
  });
}

void read_pages_cpu(const ReadPagesArgs& args, Stream& stream) {
  const int64_t pages = (args.bytes + args.page_bytes - 1) / args.page_bytes;
  stream.parallel_for(static_cast<size_t>(pages), [&](size_t i, int) {
    const int64_t offset = static_cast<int64_t>(i) * args.page_bytes;
    std::memcpy(args.target + offset, args.pool + args.pages[i] * args.page_bytes,
                static_cast<size_t>(std::min(args.page_bytes, args.bytes - offset)));
  });
}

}  // namespace moelora
