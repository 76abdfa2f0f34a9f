// SPDX-License-Identifier: Apache-2.0
// What happens to a simulated engine, as numbers alone: enough to do it again. One JSON object a line in a trace:
// {"event":"read","request":12,"tokens":3}.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace moelora::sim {

// The names of kinds and fields are in event.cc. Requests, adapters and sessions are numbered by whoever makes the
// events, from 0 on and never twice; -1 is "none". What an event names and what is not (any more) there makes it idle.
enum class EventType : uint8_t {
  kStep,
  kSubmit,
  kTurn,
  kCancel,
  kRead,
  kLoad,
  kClone,
  kUnload,
  kPin,
  kUnpin,
  kPrefetch,
  kOpen,
  kFork,
  kRollback,
  kClose,
  kTrim,
  kUpload,
  kDisk,
  kSettle,
};
constexpr size_t kNumEventTypes = 19;
constexpr size_t kNumFieldsMax = 11;

// Salts from here on are used once.
constexpr int64_t kOwnSalt = 1000;

// How a request is made and read: bits of the field `flags`.
enum RequestFlags : int64_t {
  kSlowReader = 1,   // reads by kRead events alone
  kTemperature = 2,  // tokens depend on seed and draw index
  kPenalty = 4,      // tokens depend on the token counts
  kStopToken = 8,    // has a stop token of its own
  kMinTokens = 16,   // no end before the fourth token
  kCapture = 32,     // keeps logits of the second half of its prompt
};

struct Event {
  EventType type = EventType::kStep;
  std::array<int64_t, kNumFieldsMax> fields{};  // in the order of their names
};

const char* name_of(EventType type);
std::string to_json(const Event& event);
// Throws std::runtime_error naming what is wrong with the line.
Event from_json(const std::string& line);

}  // namespace moelora::sim
