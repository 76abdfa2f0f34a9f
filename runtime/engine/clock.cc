// SPDX-License-Identifier: Apache-2.0
// The engine's clock, alone in its file: the simulator (tests/sim) links its own in its place.
#include <chrono>

#include "runtime/engine/engine_parts.h"

namespace moelora {

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace moelora
