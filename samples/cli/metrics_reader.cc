// SPDX-License-Identifier: Apache-2.0
// See metrics_reader.h.
#include "samples/cli/metrics_reader.h"

#include <cstdlib>
#include <sstream>

namespace moelora_cli {
namespace {

// NAME="value",NAME="value" up to the closing brace; `at` is left behind it. In a value \\, \" and \n are escapes.
std::map<std::string, std::string> read_labels(const std::string& line, size_t& at) {
  std::map<std::string, std::string> labels;
  while (at < line.size() && line[at] != '}') {
    const size_t equals = line.find("=\"", at);
    if (equals == std::string::npos) {
      return {};
    }
    const std::string name = line.substr(at, equals - at);
    std::string value;
    for (at = equals + 2; at < line.size() && line[at] != '"'; ++at) {
      const bool is_escape = line[at] == '\\' && at + 1 < line.size();
      at += is_escape ? 1 : 0;
      value += is_escape && line[at] == 'n' ? '\n' : line[at];
    }
    at += at < line.size() ? 1 : 0;
    at += at < line.size() && line[at] == ',' ? 1 : 0;
    labels[name] = value;
  }
  at += at < line.size() ? 1 : 0;
  return labels;
}

std::string without(const std::string& prefix, const std::string& name) {
  return name.rfind(prefix, 0) == 0 ? name.substr(prefix.size()) : name;
}

}  // namespace

MetricsSnapshot read_metrics(const std::string& text) {
  MetricsSnapshot snapshot;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    size_t at = line.find_first_of("{ ");
    if (line.empty() || line[0] == '#' || at == std::string::npos) {
      continue;
    }
    const std::string name = line.substr(0, at);
    const bool has_labels = line[at] == '{';
    ++at;
    const std::map<std::string, std::string> labels =
        has_labels ? read_labels(line, at) : std::map<std::string, std::string>();
    const double value = std::strtod(line.c_str() + at, nullptr);
    if (!has_labels) {
      snapshot.values[without("moelora_", name)] = value;
    } else if (labels.count("adapter") > 0 && labels.count("id") > 0) {
      AdapterSamples& samples = snapshot.adapters[labels.at("id")];
      samples.name = labels.at("adapter");
      samples.values[without("moelora_adapter_", name)] = value;
    }
  }
  return snapshot;
}

}  // namespace moelora_cli
