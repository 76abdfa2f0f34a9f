// SPDX-License-Identifier: Apache-2.0
// One line of `moelora run`: JSON in, JSON out. Field names are the file format; an unknown field is an error of
// that request, so that a misspelt one does not silently give defaults.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "samples/cli/host.h"

namespace moelora_cli {

using Json = nlohmann::ordered_json;

struct RunContext {
  const Engine* engine;
  const Queue* queue;
  std::map<std::string, moelora_adapter> adapters;
  moelora_sampling defaults;
  bool has_text;  // the model has a tokenizer
};

// The id of a line: its "id", or its number (from 1). Never throws.
Json run_id(const Json& line, size_t number);
// Builds the request of a parsed line; throws Failure naming the field.
Request make_run_request(const RunContext& context, const Json& line, uint64_t tag);
Json run_answer(const Json& id, const Request& request);
Json run_error(const Json& id, moelora_status status, const std::string& message);

}  // namespace moelora_cli
