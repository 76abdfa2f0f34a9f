// SPDX-License-Identifier: Apache-2.0
// moelora bench --trace: requests arrive at the times of a trace, whether or not those before are done (open loop),
// once for each number of adapters asked and as often as asked, by turns. Each run has an engine of its own with that
// many adapters registered, so that none finds what another has left.
#pragma once

#include "samples/cli/bench_trace_report.h"
#include "samples/cli/command.h"

namespace moelora_cli {

void add_trace_options(CLI::App& command, TraceFlags& flags);
int bench_trace(const CLI::App& command, TraceFlags flags, EngineFlags engine);

}  // namespace moelora_cli
