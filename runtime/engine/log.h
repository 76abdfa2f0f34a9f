// SPDX-License-Identifier: Apache-2.0
// What the library has to say besides statuses: to the host's callback if it set one, and into a ring that hosts
// pull from. Nothing else is ever written anywhere. Called on any thread, never in a step's hot path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/base/error.h"

namespace moelora {

enum class LogLevel : int32_t { kNone = 0, kError = 1, kWarning = 2, kInfo = 3, kDebug = 4 };
using LogFunction = void (*)(void* user, int32_t level, const char* text);

void log_message(LogLevel level, const std::string& text);
// No call of the previous function is in flight after this returns.
void set_log(LogLevel level, LogFunction function, void* user);
// Oldest kept message: kOk and copied, kMore (too long; it stays), kTimeout.
Status read_log(int32_t timeout_ms, char* buffer, size_t capacity, size_t* n, int32_t* level);
// True on a thread that is inside the host's callback.
bool in_log_callback();

}  // namespace moelora
