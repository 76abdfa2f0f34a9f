// SPDX-License-Identifier: Apache-2.0
// moelora: the command-line host of the library, one file a subcommand. It uses what any host can use, the public
// headers, so that whatever it shows can be had through the C API.
#include <cstdio>
#include <exception>
#include <string>

#include "samples/cli/command.h"

namespace moelora_cli {

void add_engine_flags(CLI::App& command, EngineFlags& flags, bool model_required) {
  CLI::Option* model = command.add_option("--model", flags.model, "model folder (config.json, safetensors)");
  if (model_required) {
    model->required();
  }
  command.add_option("--device", flags.device, "cpu, cuda or cuda:N");
  command.add_option("--compute", flags.compute, "exact (initially) or bf16");
  command.add_option("--threads", flags.threads, "worker threads; 0: one a core")->check(CLI::NonNegativeNumber);
  command.add_flag("--deterministic", flags.deterministic, "a row's bits do not depend on its neighbours");
  command.add_option("--options", flags.options_file, "TOML file of engine options");
  command.add_option("--set", flags.settings, "engine option KEY=VALUE; may be repeated")->allow_extra_args(false);
}

void add_observe_flags(CLI::App& command, EngineFlags& flags) {
  command.add_option("--timeline", flags.timeline, "file for the steps, uploads and requests, as JSON for Perfetto");
  command.add_flag("!--no-live", flags.live, "`moelora top` cannot look at this process");
}

}  // namespace moelora_cli

namespace {

std::string version_text() {
  return std::string("moelora ") + moelora_version_string() + "\n" + moelora_build_info();
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Many LoRA adapters at once on one frozen language model", "moelora");
  app.require_subcommand(1);
  app.set_version_flag("--version", version_text());
  int exit_code = 0;
  moelora_cli::add_generate(app, &exit_code);
  moelora_cli::add_run(app, &exit_code);
  moelora_cli::add_verify(app, &exit_code);
  moelora_cli::add_inspect(app, &exit_code);
  moelora_cli::add_bench(app, &exit_code);
  moelora_cli::add_top(app, &exit_code);
  moelora_cli::add_tokenize(app, &exit_code);
  moelora_cli::add_detokenize(app, &exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const std::exception& error) {
    const auto chosen = app.get_subcommands();
    std::fprintf(stderr, "moelora%s%s: %s\n", chosen.empty() ? "" : " ",
                 chosen.empty() ? "" : chosen.front()->get_name().c_str(), error.what());
    return 1;
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    std::fprintf(stderr, "moelora: the standard output could not be written\n");
    return 1;
  }
  return exit_code;
}
