// SPDX-License-Identifier: Apache-2.0
// Many adapters at once on one model, shown and checked: the same beginning of a story told by the base model and by
// five adapters in one batch; requests that come and go beside each other, an adapter loaded and unloaded meanwhile;
// adapters at other scales; a session that is continued in two ways. Everything said to hold is compared; the exit
// code is 1 if something does not, and 77 where there is no such device. Made of the public C API through demo_host.h.
//
//   demo MODEL_DIR ADAPTERS_DIR [--device cpu|cuda] [--threads N]
#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "samples/demo_page.h"

namespace demo {
namespace {

const std::vector<std::string> kNames = {"pirate", "spanish", "capitals", "numbered", "song"};

class Demo {
 public:
  explicit Demo(const Options& options)
      : options_(options), host_(options), near_tie_(options.device == "cpu" ? 1e-3f : 0.5f) {}

  void open();
  void side_by_side();
  void come_and_go();
  void scales();
  void session();

 private:
  [[nodiscard]] std::string folder(const std::string& adapter) const { return options_.adapters + "/" + adapter; }
  void say_batches(const std::vector<Story>& stories, const Batches& batches, double seconds) const;
  // A sum in another order may turn a choice between two tokens that are nearly equal: what follows is not compared.
  [[nodiscard]] bool same_or_near_tie(const Story& one, const Story& other);
  void tell_again_alone(const std::vector<Story>& stories, double seconds_together);

  Options options_;
  Host host_;
  float near_tie_;  // of log-probabilities; bf16 on a GPU
  std::map<std::string, moelora_adapter> adapters_{{"base", 0}};
};

void Demo::open() {
  const moelora_engine_info info = host_.info();
  const bool cpu = info.device_kind == MOELORA_DEVICE_CPU;
  say("%s: %d layers, %d experts of which %d work on a token, %s, %.1f MB", info.architecture, info.num_layers,
      info.num_experts, info.num_experts_active, info.dtype, static_cast<double>(info.weight_bytes) / 1e6);
  say("on %s%s", info.device_name, cpu ? (", threads: " + std::to_string(info.num_threads)).c_str() : "");
  for (const std::string& name : kNames) {
    const double start = now_s();
    adapters_[name] = host_.load(name, folder(name));
    moelora_adapter_info adapter;
    moelora_adapter_info_init(&adapter);
    must(moelora_adapter_info_get, host_.engine(), adapters_[name], &adapter);
    const bool attention = (adapter.targets & (MOELORA_TARGET_Q | MOELORA_TARGET_O)) != 0;
    const bool router = (adapter.targets & MOELORA_TARGET_ROUTER) != 0;
    const bool experts = (adapter.targets & MOELORA_TARGET_EXPERT_DOWN) != 0;
    say("  adapter %-9s rank %2d, %3d tensors, on%s%s%s; loaded in %.0f ms", name.c_str(), adapter.max_rank,
        adapter.tensors_matched, attention ? " attention" : "", router ? " router" : "", experts ? " experts" : "",
        1e3 * (now_s() - start));
  }
}

void Demo::say_batches(const std::vector<Story>& stories, const Batches& batches, double seconds) const {
  size_t tokens = 0;
  for (const Story& story : stories) {
    tokens += story.tokens.size();
  }
  note("batched:",
       "%zu tokens in %.2f s, %.0f tokens/s: %zu steps, on average of %.1f rows with %.1f different adapters and %.1f "
       "active experts a layer; at most %d rows, %d requests, %d adapters",
       tokens, seconds, static_cast<double>(tokens) / seconds, batches.steps, batches.rows, batches.adapters,
       batches.experts, batches.most_rows, batches.most_sequences, batches.most_adapters);
}

void Demo::side_by_side() {
  const std::string beginning = "One evening Tom and the owl";
  title("\"" + beginning + "...\" by the base and by five adapters, one batch, streamed");
  std::vector<Story> stories;
  for (const auto& [name, adapter] : adapters_) {
    stories.push_back({.name = name, .beginning = beginning, .adapter = adapter});
  }
  const uint64_t step = host_.steps();
  const double start = now_s();
  Growing page;
  host_.run(stories, [&] { page.draw(stories); });
  const double seconds = now_s() - start;
  page.finish(stories);
  const Batches batches = host_.batches_since(step);
  say_batches(stories, batches, seconds);

  expect(batches.most_sequences == 6 && batches.most_adapters == 5, "all six ran in the same steps");
  bool different = true, joined = true;
  int least = INT_MAX, most = 0;
  for (size_t i = 0; i < stories.size(); ++i) {
    joined = joined && stories[i].text == host_.detokenize(stories[i].tokens);
    least = std::min(least, stories[i].pieces);
    most = std::max(most, stories[i].pieces);
    for (size_t j = 0; j < i; ++j) {
      different = different && stories[i].text != stories[j].text;
    }
  }
  expect(different, "six different texts");
  expect(joined, "each text, which came in pieces (" + std::to_string(least) + " to " + std::to_string(most) +
                     "), is that of its tokens");
}

void Demo::come_and_go() {
  title("Requests come and go while others run");
  std::vector<Story> stories = {
      {.name = "base", .beginning = "Once upon a time, a little fox"},
      {.name = "pirate", .beginning = "Long ago, a brave mouse named Max"},
      {.name = "song", .beginning = "One morning the rabbit planted a", .max_tokens = 60},
      {.name = "capitals", .beginning = "There once was a young bear who", .leave_after = 40},
      {.name = "spanish", .beginning = "Early one morning Nora wanted to make"},
      {.name = "numbered", .beginning = "One rainy day Lily could not find her", .max_tokens = 80},
      {.name = "base", .beginning = "One summer night a hungry wolf", .max_tokens = 40},
      {.name = "pirate", .beginning = "In a village in the valley lived", .max_tokens = 60},
      {.name = "new", .beginning = "One evening Tom and the owl"},
      {.name = "capitals", .beginning = "One morning Anna found", .max_tokens = 50}};
  constexpr size_t kFirst = 3, kTokensBetween = 55, kNew = 8;
  for (Story& story : stories) {
    story.adapter = adapters_[story.name];
  }
  const uint64_t step = host_.steps();
  const double start = now_s();
  size_t submitted = 0, running_then = 0;
  double load_ms = 0;
  while (submitted < stories.size() || host_.running() > 0) {
    size_t tokens = 0;
    for (const Story& story : stories) {
      tokens += story.tokens.size();
    }
    // Three at once, then one more each time that some tokens have been made, or if nothing else runs.
    while (submitted < stories.size() &&
           (host_.running() == 0 || submitted < kFirst || tokens >= kTokensBetween * (submitted - kFirst + 1))) {
      if (submitted == kNew) {
        running_then = host_.running();
        const double load_start = now_s();
        stories[kNew].adapter = host_.load("new", folder("song"));
        load_ms = 1e3 * (now_s() - load_start);
      }
      host_.submit({&stories[submitted]});
      if (submitted == kNew) {
        must(moelora_adapter_unload, host_.engine(), stories[kNew].adapter, 0u);
      }
      ++submitted;
    }
    host_.take();
  }
  const double seconds = now_s() - start;
  chart(stories);
  say_batches(stories, host_.batches_since(step), seconds);
  note("loaded:", "adapter 'new' in %.0f ms, while %zu requests ran; unloaded while its own ran", load_ms,
       running_then);

  moelora_adapter found = 0;
  moelora_error error;
  moelora_error_init(&error);
  expect(moelora_adapter_find(host_.engine(), "new", MOELORA_STRLEN, &found, &error) == MOELORA_E_NOT_FOUND &&
             stories[kNew].result.status == MOELORA_OK,
         "the unloaded adapter is gone, and its request came to its end");
  stories[kNew].adapter = adapters_["song"];  // of the same folder
  tell_again_alone(stories, seconds);
}

bool Demo::same_or_near_tie(const Story& one, const Story& other) {
  if (same(one, other)) {
    return true;
  }
  const size_t at = first_difference(one, other);
  const Story margins = host_.again(one, true);
  const bool near_tie = at < margins.margins.size() && margins.margins[at] <= near_tie_;
  note(one.name, "token %zu is another one%s", at, near_tie ? ": a near-tie" : "");
  return near_tie;
}

void Demo::tell_again_alone(const std::vector<Story>& stories, double seconds_together) {
  size_t equal = 0;
  const double start = now_s();
  for (const Story& story : stories) {
    const Story alone = host_.again(story);
    const bool is_same = same_or_near_tie(alone, story);
    equal += is_same ? 1 : 0;
    if (!is_same) {
      std::fputs(beside(story.name, story.text).c_str(), stdout);
      std::fputs(beside("alone:", alone.text).c_str(), stdout);
    }
  }
  const double seconds = now_s() - start;
  note("alone:", "one after the other they take %.2f s, %.1f times as long", seconds, seconds / seconds_together);
  expect(equal == stories.size(), std::to_string(equal) + " of " + std::to_string(stories.size()) +
                                      " have the text that they have alone, whatever came and went beside them");
}

void Demo::scales() {
  const std::string beginning = "Early one morning Nora wanted to make";
  title("\"" + beginning + "...\" with the same adapter at other scales, one batch");
  const moelora_adapter pirate = adapters_["pirate"];
  moelora_adapter half = 0;  // shares the weights
  must(moelora_adapter_clone, host_.engine(), pirate, "half a pirate", MOELORA_STRLEN, 0.5f, &half);
  std::vector<Story> stories = {{.name = "base", .adapter = 0},
                                {.name = "pirate x 0", .adapter = pirate, .scale = 0.0f},
                                {.name = "pirate x 0.5", .adapter = pirate, .scale = 0.5f},
                                {.name = "its clone", .adapter = half},
                                {.name = "pirate x 1", .adapter = pirate}};
  for (Story& story : stories) {
    story.beginning = beginning;
    story.max_tokens = 56;
  }
  host_.run(stories);
  Growing().finish(stories);
  must(moelora_adapter_unload, host_.engine(), half, 0u);
  expect(same(stories[0], stories[1]), "scale 0 is the base model, token by token");
  expect(same(stories[2], stories[3]), "half the scale in the request is half the scale in a clone");
  expect(stories[2].text != stories[0].text && stories[2].text != stories[4].text,
         "half the scale is neither the base nor the whole adapter");
}

void Demo::session() {
  title("A session is continued in two ways");
  moelora_session session = 0, fork = 0;
  must(moelora_session_create, host_.engine(), adapters_["pirate"], 1.0f, &session);
  std::vector<Story> first = {
      {.name = "first turn", .beginning = "Once upon a time, a little fox", .session = session, .max_tokens = 10}};
  host_.run(first);
  must(moelora_session_fork, host_.engine(), session, &fork);
  std::vector<Story> turns = {
      {.name = "second turn", .beginning = " One day a hungry wolf", .session = session, .max_tokens = 40},
      {.name = "in a fork", .beginning = " One day th' fox found", .session = fork, .max_tokens = 40}};
  host_.run(turns);
  std::fputs(beside(first[0].name, first[0].beginning + "..." + first[0].text).c_str(), stdout);
  for (const Story& turn : turns) {
    std::fputs(beside(turn.name, turn.beginning.substr(1) + "..." + turn.text).c_str(), stdout);
  }

  std::vector<int32_t> history = host_.tokenize(first[0].beginning);
  history.insert(history.end(), first[0].tokens.begin(), first[0].tokens.end());
  std::vector<Story> whole;
  for (const Story& turn : turns) {
    whole.push_back({.name = turn.name, .adapter = adapters_["pirate"], .prompt_tokens = history, .max_tokens = 40});
    const std::vector<int32_t> more = host_.tokenize(turn.beginning);
    whole.back().prompt_tokens.insert(whole.back().prompt_tokens.end(), more.begin(), more.end());
  }
  host_.run(whole);
  const int32_t kept[2] = {turns[0].result.cached_tokens, turns[1].result.cached_tokens};
  note("computed:", "again of the first turn's %zu tokens: %d by the second, %d by the fork", history.size(),
       static_cast<int>(history.size()) - kept[0], static_cast<int>(history.size()) - kept[1]);
  expect(kept[0] > 0 && kept[1] > 0 && same_or_near_tie(whole[0], turns[0]) && same_or_near_tie(whole[1], turns[1]),
         "both turns have the text of a request that gives the whole history");
  must(moelora_session_close, host_.engine(), session);
  must(moelora_session_close, host_.engine(), fork);
}

bool parse(int argc, char** argv, Options& options) {
  std::vector<std::string> folders;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--device" && i + 1 < argc) {
      options.device = argv[++i];
    } else if (word == "--threads" && i + 1 < argc) {
      options.threads = std::atoi(argv[++i]);
    } else {
      folders.push_back(word);
    }
  }
  if (folders.size() != 2 || folders[0][0] == '-' || folders[1][0] == '-') {
    std::fprintf(stderr, "usage: %s MODEL_DIR ADAPTERS_DIR [--device cpu|cuda] [--threads N]\n", argv[0]);
    return false;
  }
  options.model = folders[0];
  options.adapters = folders[1];
  return true;
}

}  // namespace
}  // namespace demo

int main(int argc, char** argv) {
  demo::Options options;
  if (!demo::parse(argc, argv, options)) {
    return 2;
  }
  try {
    demo::Demo demo(options);
    demo.open();
    demo.side_by_side();
    demo.come_and_go();
    demo.scales();
    demo.session();
  } catch (const demo::Failure& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return error.status == MOELORA_E_NO_DEVICE ? 77 : 1;
  }
  demo::say("\n%d of %d checks hold", demo::num_checks() - demo::num_failed(), demo::num_checks());
  return demo::num_failed() == 0 ? 0 : 1;
}
