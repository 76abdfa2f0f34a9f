// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/event.h"

#include <stdexcept>
#include <vector>

#include <nlohmann/json.hpp>

namespace moelora::sim {
namespace {

struct Kind {
  const char* name;
  std::vector<const char*> fields;
};

// By EventType.
const std::array<Kind, kNumEventTypes>& kinds() {
  static const std::array<Kind, kNumEventTypes> table = {{
      {"step", {"microseconds"}},  // that have passed before it
      {"submit",
       {"request", "adapter", "permille", "text", "prompt", "own", "max_tokens", "priority", "deadline_ms", "flags",
        "salt"}},
      {"turn",
       {"request", "session", "text", "prompt", "own", "max_tokens", "priority", "deadline_ms", "flags", "salt"}},
      {"cancel", {"request", "drop_turn"}},
      {"read", {"request", "tokens"}},
      {"load", {"adapter", "name", "granules", "permille", "folder"}},  // replaces whoever has the name
      {"clone", {"adapter", "name", "source", "permille"}},
      {"unload", {"adapter", "if_idle"}},
      {"pin", {"adapter"}},
      {"unpin", {"adapter"}},
      {"prefetch", {"adapter"}},
      {"open", {"session", "adapter", "permille"}},
      {"fork", {"session", "source"}},
      {"rollback", {"session", "permille"}},  // of its tokens stay
      {"close", {"session"}},
      {"trim", {"permille"}},  // of the pool
      {"upload", {"fails"}},   // the next chunk on its way arrives
      {"disk", {"fails"}},     // the next adapter on its way to host memory does
      {"settle", {"close_all"}},
  }};
  return table;
}

const Kind& kind_of(EventType type) {
  return kinds()[static_cast<size_t>(type)];
}

}  // namespace

const char* name_of(EventType type) {
  return kind_of(type).name;
}

std::string to_json(const Event& event) {
  const Kind& kind = kind_of(event.type);
  std::string line = std::string(R"({"event":")") + kind.name + '"';
  for (size_t i = 0; i < kind.fields.size(); ++i) {
    line += std::string(",\"") + kind.fields[i] + "\":" + std::to_string(event.fields[i]);
  }
  return line + '}';
}

Event from_json(const std::string& line) {
  const nlohmann::json object = nlohmann::json::parse(line, nullptr, false);
  if (!object.is_object() || !object.contains("event")) {
    throw std::runtime_error("no event: " + line);
  }
  const auto name = object["event"].get<std::string>();
  for (size_t type = 0; type < kNumEventTypes; ++type) {
    const Kind& kind = kinds()[type];
    if (name != kind.name) {
      continue;
    }
    Event event;
    event.type = static_cast<EventType>(type);
    for (size_t i = 0; i < kind.fields.size(); ++i) {
      if (!object.contains(kind.fields[i])) {
        throw std::runtime_error("no field '" + std::string(kind.fields[i]) + "': " + line);
      }
      event.fields[i] = object[kind.fields[i]].get<int64_t>();
    }
    return event;
  }
  throw std::runtime_error("unknown event: " + line);
}

}  // namespace moelora::sim
