// SPDX-License-Identifier: Apache-2.0
// moelora generate: one prompt, text or token ids, answered by the base model and by any number of adapters in one
// batch. A prompt of text is answered in text. One answer is printed while it comes, several ones are printed as they
// come (ids) or end (text).
#include <cstdio>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "samples/cli/command.h"

namespace moelora_cli {
namespace {

struct GenerateFlags {
  EngineFlags engine;
  std::string tokens, tokens_file, text, text_file;
  std::vector<std::string> stops, adapters;
  bool base = false;
  bool json = false;
  bool ignore_eos = false;
  bool text_given = false;  // --text, perhaps empty
  bool in_text = false;     // the prompt is text
  bool has_text = false;    // so the answers have some
  float scale = 1.0f;
  moelora_sampling sampling;
};

struct Answer {
  std::string name;
  Request request;
};

void print_tokens(const Answer& answer, size_t first, bool named) {
  if (named) {
    std::printf("%s\t", answer.name.c_str());
  }
  for (size_t i = first; i < answer.request.tokens().size(); ++i) {
    std::printf("%d%s", answer.request.tokens()[i], named && i + 1 == answer.request.tokens().size() ? "" : " ");
  }
  if (named) {
    std::printf("\n");
  }
  std::fflush(stdout);
}

// What one read has brought.
void print_new(const Answer& answer, size_t first_token, size_t first_byte, bool in_text, bool named) {
  if (!in_text) {
    if (first_token < answer.request.tokens().size()) {
      print_tokens(answer, first_token, named);
    }
    return;
  }
  const std::string& text = answer.request.text();
  if (!named) {
    std::fwrite(text.data() + first_byte, 1, text.size() - first_byte, stdout);
  } else if (answer.request.finished()) {
    std::printf("%s:\n", answer.name.c_str());
    std::fwrite(text.data(), 1, text.size(), stdout);  // may have NUL characters
    std::printf("\n");
  }
  std::fflush(stdout);
}

std::vector<Answer> make_answers(const GenerateFlags& flags, const Engine& engine, const Queue& queue,
                                 const std::string& text, const std::vector<int32_t>& tokens) {
  std::vector<std::pair<std::string, moelora_adapter>> choices;
  if (flags.base || flags.adapters.empty()) {
    choices.emplace_back("base", 0);
  }
  for (const std::string& text : flags.adapters) {
    const AdapterFlag adapter = parse_adapter(text);
    choices.emplace_back(adapter.name, engine.load(adapter));
  }
  std::vector<Answer> answers;
  for (const auto& [name, adapter] : choices) {
    Request request(engine.get());
    if (flags.in_text) {
      request.set_text(text);
    } else {
      request.set_tokens(tokens);
    }
    for (const std::string& stop : flags.stops) {
      request.add_stop(stop);
    }
    if (flags.has_text) {
      request.want_text();
    }
    request.set_sampling(flags.sampling);
    request.set_adapter(adapter, adapter == 0 ? 1.0f : flags.scale);
    request.set_queue(queue, answers.size());
    answers.push_back({name, std::move(request)});
  }
  return answers;
}

void stream(std::vector<Answer>& answers, const Queue& queue, const GenerateFlags& flags) {
  size_t running = answers.size();
  while (running > 0) {
    for (const moelora_event& event : queue.wait(-1)) {
      if (event.kind != MOELORA_EVENT_TOKENS && event.kind != MOELORA_EVENT_FINISHED) {
        continue;
      }
      Answer& answer = answers[event.tag];
      const bool was_finished = answer.request.finished();
      if (was_finished) {
        continue;
      }
      const size_t tokens = answer.request.tokens().size();
      const size_t bytes = answer.request.text().size();
      answer.request.read(0);
      if (!flags.json) {
        print_new(answer, tokens, bytes, flags.in_text, answers.size() > 1);
      }
      running -= answer.request.finished() ? 1 : 0;
    }
  }
  if (!flags.json && answers.size() == 1) {
    std::printf("\n");
  }
}

void report(const std::vector<Answer>& answers, double ms, bool json) {
  size_t total = 0;
  for (const Answer& answer : answers) {
    const moelora_result result = answer.request.result();
    total += answer.request.tokens().size();
    if (json) {
      nlohmann::json line = {{"adapter", answer.name},
                             {"tokens", answer.request.tokens()},
                             {"finish_reason", finish_name(result.finish_reason)},
                             {"seed", result.seed},
                             {"first_token_ms", result.first_token_ms}};
      if (answer.request.wants_text()) {
        line["text"] = answer.request.text();
      }
      std::printf("%s\n", line.dump().c_str());
    } else {
      std::fprintf(stderr, "%s: %zu tokens, ended by %s, first after %.1f ms, seed %llu\n", answer.name.c_str(),
                   answer.request.tokens().size(), finish_name(result.finish_reason), result.first_token_ms,
                   static_cast<unsigned long long>(result.seed));
    }
  }
  std::fprintf(stderr, "%zu tokens in %.2f s, %.1f tokens/s\n", total, ms / 1e3, 1e3 * static_cast<double>(total) / ms);
}

int generate(GenerateFlags& flags) {
  const bool as_text = flags.text_given || !flags.text_file.empty();
  if (flags.text_given + !flags.tokens.empty() + !flags.tokens_file.empty() + !flags.text_file.empty() != 1) {
    throw Failure(MOELORA_E_INVALID, "give the prompt by one of --text, --text-file, --tokens and --tokens-file");
  }
  flags.in_text = as_text;
  std::string text = flags.text_file.empty() ? flags.text : read_file(flags.text_file);
  std::vector<int32_t> tokens;
  if (!as_text) {
    tokens = flags.tokens.empty() ? parse_tokens(read_file(flags.tokens_file), flags.tokens_file)
                                  : parse_tokens(flags.tokens, "--tokens");
  }
  flags.sampling.flags = flags.ignore_eos ? MOELORA_SAMPLING_IGNORE_EOS : 0;
  const Engine engine(flags.engine);
  const Queue queue;
  flags.has_text = flags.in_text || (flags.json && engine.has_tokenizer());
  std::vector<Answer> answers = make_answers(flags, engine, queue, text, tokens);
  std::vector<moelora_request> handles;
  for (const Answer& answer : answers) {
    handles.push_back(answer.request.handle());
  }
  const double start = now_ms();
  must(moelora_submit_batch, engine.get(), handles.data(), handles.size(), static_cast<moelora_status*>(nullptr));
  stream(answers, queue, flags);
  report(answers, now_ms() - start, flags.json);
  return 0;
}

}  // namespace

void add_generate(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<GenerateFlags>();
  moelora_sampling_init(&flags->sampling);
  CLI::App* command = app.add_subcommand("generate", "Answers a prompt with the base or with adapters");
  add_engine_flags(*command, flags->engine, true);
  CLI::Option* text = command->add_option("--text", flags->text, "the prompt; answers are text too");
  command->add_option("--text-file", flags->text_file, "file of the prompt as text");
  command->add_option("--tokens", flags->tokens, "token ids, separated by commas or spaces");
  command->add_option("--tokens-file", flags->tokens_file, "file of token ids");
  command->add_option("--adapter", flags->adapters, "NAME=DIR of an adapter; may be repeated")->allow_extra_args(false);
  command->add_flag("--base", flags->base, "answer with the base model too");
  command->add_option("--scale", flags->scale, "factor on the scale of the adapters");
  command->add_option("--stop", flags->stops, "text that ends an answer; may be repeated")->allow_extra_args(false);
  command->add_option("--max-tokens", flags->sampling.max_tokens);
  command->add_option("--temperature", flags->sampling.temperature, "0: greedy");
  command->add_option("--top-k", flags->sampling.top_k);
  command->add_option("--top-p", flags->sampling.top_p);
  command->add_option("--min-p", flags->sampling.min_p);
  command->add_option("--seed", flags->sampling.seed, "0: chosen and reported");
  command->add_flag("--ignore-eos", flags->ignore_eos);
  command->add_flag("--json", flags->json, "one JSON line an answer, at the end, instead of the stream");
  command->callback([flags, text, exit_code] {
    flags->text_given = text->count() > 0;
    *exit_code = generate(*flags);
  });
}

}  // namespace moelora_cli
