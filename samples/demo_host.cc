// SPDX-License-Identifier: Apache-2.0
// See demo_host.h.
#include "samples/demo_host.h"

#include <algorithm>
#include <array>
#include <chrono>

namespace demo {

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Host::Host(const Options& options) {
  moelora_config* config = nullptr;
  must(moelora_config_create, MOELORA_ABI_VERSION, &config);
  try {
    must(moelora_config_set_str, config, "device", MOELORA_STRLEN, options.device.c_str(), MOELORA_STRLEN);
    must(moelora_config_set_int, config, "num_threads", MOELORA_STRLEN, options.threads);
    must(moelora_engine_create, config, options.model.c_str(), MOELORA_STRLEN, &engine_);
    must(moelora_queue_create, &queue_);
    must(moelora_tokenizer_from_engine, engine_, &tokenizer_);
  } catch (...) {
    moelora_config_destroy(config);
    moelora_queue_destroy(queue_);
    moelora_engine_release(engine_);
    throw;
  }
  moelora_config_destroy(config);
}

Host::~Host() {
  moelora_tokenizer_release(tokenizer_);
  moelora_engine_release(engine_);  // cancels what still runs and closes every handle
  moelora_queue_destroy(queue_);
}

moelora_engine_info Host::info() const {
  moelora_engine_info info;
  moelora_engine_info_init(&info);
  must(moelora_engine_info_get, engine_, &info);
  return info;
}

uint64_t Host::steps() const {
  moelora_stats stats;
  moelora_stats_init(&stats);
  must(moelora_stats_get, engine_, &stats);
  return stats.steps;
}

Batches Host::batches_since(uint64_t step) const {
  std::vector<moelora_step_record> records(static_cast<size_t>(steps() - step));
  size_t count = 0;
  must(moelora_step_records, engine_, records.data(), records.size(), &count);
  records.resize(count);
  Batches all;
  all.steps = count;
  for (const moelora_step_record& record : records) {
    all.rows += record.rows / static_cast<double>(count);
    all.adapters += record.adapters / static_cast<double>(count);
    all.experts += record.active_experts / static_cast<double>(count);
    all.most_rows = std::max(all.most_rows, record.rows);
    all.most_sequences = std::max(all.most_sequences, record.sequences);
    all.most_adapters = std::max(all.most_adapters, record.adapters);
  }
  return all;
}

moelora_adapter Host::load(const std::string& name, const std::string& dir) const {
  moelora_adapter adapter = 0;
  must(moelora_adapter_load_dir, engine_, name.c_str(), MOELORA_STRLEN, dir.c_str(), MOELORA_STRLEN, 0u, &adapter);
  return adapter;
}

std::vector<int32_t> Host::tokenize(const std::string& text) const {
  std::vector<int32_t> tokens(text.size() + 1);  // a token has at least one byte
  size_t count = 0;
  must(moelora_tokenize, tokenizer_, text.data(), text.size(), 0u, tokens.data(), tokens.size(), &count);
  tokens.resize(count);
  return tokens;
}

std::string Host::detokenize(const std::vector<int32_t>& tokens) const {
  std::string text;
  size_t count = 0;
  do {
    text.resize(count);
    must(moelora_detokenize, tokenizer_, tokens.data(), tokens.size(), MOELORA_DETOKENIZE_SKIP_SPECIAL, text.data(),
         text.size(), &count);
  } while (count != text.size());
  return text;
}

void Host::build(Story& story) {
  must(moelora_request_create, engine_, &story.request);
  if (story.prompt_tokens.empty()) {
    must(moelora_request_set_text, engine_, story.request, story.beginning.data(), story.beginning.size());
  } else {
    must(moelora_request_set_tokens, engine_, story.request, story.prompt_tokens.data(), story.prompt_tokens.size());
  }
  if (story.session != 0) {
    must(moelora_request_set_session, engine_, story.request, story.session);
  } else {
    must(moelora_request_set_adapter, engine_, story.request, story.adapter, story.scale);
  }
  moelora_sampling sampling;
  moelora_sampling_init(&sampling);  // greedy: the same story each time
  sampling.max_tokens = story.max_tokens;
  sampling.logprobs = story.with_margins ? 2 : -1;
  must(moelora_request_set_sampling, engine_, story.request, &sampling);
  must(moelora_request_set_queue, engine_, story.request, queue_, reinterpret_cast<uint64_t>(&story));
}

void Host::submit(const std::vector<Story*>& stories) {
  std::vector<moelora_request> requests;
  for (Story* story : stories) {
    build(*story);
    story->first_step = steps();
    requests.push_back(story->request);
    running_.push_back(story);
  }
  must(moelora_submit_batch, engine_, requests.data(), requests.size(), static_cast<moelora_status*>(nullptr));
}

void Host::take() {
  std::array<moelora_event, 32> events;
  size_t count = 0;
  must(moelora_queue_wait, queue_, -1, events.data(), events.size(), &count);
  for (size_t i = 0; i < count; ++i) {
    auto* story = reinterpret_cast<Story*>(events[i].tag);
    // A story that was read to its end has no more to say: its last event may still be in the queue.
    if (std::find(running_.begin(), running_.end(), story) != running_.end()) {
      read(*story);
    }
  }
}

void Host::read(Story& story) {
  std::array<int32_t, 64> tokens;
  std::array<char, 1024> text;
  while (true) {
    moelora_chunk chunk;
    moelora_chunk_init(&chunk);
    const moelora_status status = must(moelora_request_read, engine_, story.request, 0, tokens.data(), tokens.size(),
                                       text.data(), text.size(), &chunk);
    if (status == MOELORA_TIMEOUT) {
      break;
    }
    if (status == MOELORA_END) {
      end(story);
      return;
    }
    story.tokens.insert(story.tokens.end(), tokens.begin(), tokens.begin() + chunk.num_tokens);
    story.text.append(text.data(), chunk.num_text_bytes);
    story.pieces += chunk.num_text_bytes > 0 ? 1 : 0;
  }
  if (story.leave_after > 0 && story.tokens.size() >= story.leave_after) {
    must(moelora_request_cancel, engine_, story.request, 0u);  // its end comes as an event
  }
}

void Host::read_margins(Story& story) const {
  std::vector<moelora_logprob> best(3 * story.tokens.size());  // the token taken and the two best, a position
  size_t count = 0;
  must(moelora_request_read_logprobs, engine_, story.request, 0, static_cast<int32_t>(story.tokens.size()), best.data(),
       best.size(), &count);
  for (size_t i = 0; i + 2 < count; i += 3) {
    story.margins.push_back(best[i + 1].logprob - best[i + 2].logprob);
  }
}

void Host::end(Story& story) {
  moelora_result_init(&story.result);
  must(moelora_request_result, engine_, story.request, &story.result);
  if (story.with_margins) {
    read_margins(story);
  }
  must(moelora_request_close, engine_, story.request);
  story.request = 0;
  story.last_step = steps();
  story.finished = true;
  running_.erase(std::find(running_.begin(), running_.end(), &story));
}

void Host::run(std::vector<Story>& stories, const std::function<void()>& after_each) {
  std::vector<Story*> pointers;
  for (Story& story : stories) {
    pointers.push_back(&story);
  }
  submit(pointers);
  while (!running_.empty()) {
    take();
    after_each();
  }
}

Story Host::again(const Story& story, bool with_margins) {
  std::vector<Story> alone = {{.name = story.name,
                               .beginning = story.beginning,
                               .adapter = story.adapter,
                               .scale = story.scale,
                               .prompt_tokens = story.prompt_tokens,
                               .max_tokens = story.max_tokens,
                               .leave_after = story.leave_after,
                               .with_margins = with_margins}};
  run(alone);
  return alone[0];
}

}  // namespace demo
