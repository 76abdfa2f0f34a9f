// SPDX-License-Identifier: Apache-2.0
// Reads what moelora_metrics_text writes, as far as `moelora top` needs it: samples without labels by name, samples of
// adapters by adapter and name. Others (histograms, the info line) are passed over.
#pragma once

#include <map>
#include <string>
#include <utility>

namespace moelora_cli {

struct AdapterSamples {
  std::string name;                      // the label, unescaped
  std::map<std::string, double> values;  // by metric, without the common prefix moelora_adapter_
};

struct MetricsSnapshot {
  std::map<std::string, double> values;            // without the common prefix moelora_
  std::map<std::string, AdapterSamples> adapters;  // by id

  [[nodiscard]] double value(const std::string& name) const {  // 0 of what is not there
    const auto found = values.find(name);
    return found == values.end() ? 0 : found->second;
  }
};

MetricsSnapshot read_metrics(const std::string& text);

}  // namespace moelora_cli
