// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/error.h"

namespace moelora {

void fail_assert(const char* condition, const char* file, int line) {
  throw Error(Status::kInternal,
              std::string("broken invariant: ") + condition + " at " + file + ":" + std::to_string(line));
}

}  // namespace moelora
