// SPDX-License-Identifier: Apache-2.0
// The subcommands: each adds itself to the application, with its options, and leaves its exit code when it ran:
// 0 all well, 1 something failed (and was said), 2 wrong usage.
#pragma once

#include <CLI/CLI.hpp>

#include "samples/cli/host.h"

namespace moelora_cli {

void add_generate(CLI::App& app, int* exit_code);
void add_run(CLI::App& app, int* exit_code);
void add_verify(CLI::App& app, int* exit_code);
void add_inspect(CLI::App& app, int* exit_code);
void add_bench(CLI::App& app, int* exit_code);
void add_top(CLI::App& app, int* exit_code);
void add_tokenize(CLI::App& app, int* exit_code);
void add_detokenize(CLI::App& app, int* exit_code);

// --device, --compute, --threads, --deterministic, --options, --set; --model too, if asked.
void add_engine_flags(CLI::App& command, EngineFlags& flags, bool model_required);
// --timeline, --no-live: for commands that work for a while.
void add_observe_flags(CLI::App& command, EngineFlags& flags);

}  // namespace moelora_cli
