// SPDX-License-Identifier: Apache-2.0
// Random churn of a prefix cache against a map of what must be in it, contents of the pages and all audits included.
#include <algorithm>
#include <list>
#include <map>
#include <random>
#include <vector>

#include "tests/memory/prefix_cache_support.h"

namespace moelora::test {
namespace {

// What must be cached: keys are the number of the space and all tokens.
struct Model {
  struct Entry {
    int32_t holders = 0;
    uint64_t idle_at = 0;
    uint64_t content = 0;
  };
  struct Run {
    explicit Run(KvSequence kv) : kv(std::move(kv)) {}
    KvSequence kv;
    int32_t space = 0;
    Tokens tokens;
    size_t held = 0;  // blocks
  };
  static Tokens key(const Run& run, size_t blocks) {
    Tokens key = {run.space};
    key.insert(key.end(), run.tokens.begin(), run.tokens.begin() + static_cast<ptrdiff_t>(blocks * kBlock));
    return key;
  }
  size_t num_idle() const {
    return static_cast<size_t>(
        std::count_if(entries.begin(), entries.end(), [](const auto& entry) { return entry.second.holders == 0; }));
  }
  void evict() {
    auto oldest = entries.end();
    for (auto at = entries.begin(); at != entries.end(); ++at) {
      if (at->second.holders == 0 && (oldest == entries.end() || at->second.idle_at < oldest->second.idle_at)) {
        oldest = at;
      }
    }
    REQUIRE(oldest != entries.end());
    entries.erase(oldest);
  }
  void keep(Run& run, size_t blocks) {
    while (run.held > blocks) {
      Entry& entry = entries.at(key(run, run.held--));
      if (--entry.holders == 0) {
        entry.idle_at = ++clock;
      }
    }
  }
  std::map<Tokens, Entry> entries;
  uint64_t clock = 0;
};

struct Churn {
  Churn(uint64_t hash_mask, unsigned seed) : cache(18, hash_mask), random(seed) {
    for (uint64_t i = 0; i < 3; ++i) {
      spaces.push_back(cache.prefix.open_space({i, static_cast<uint32_t>(i), ""}));
    }
  }

  uint64_t& content(const Model::Run& run, size_t block) {
    const PageId page = run.kv.pages.data()[block * static_cast<size_t>(cache.groups)];
    return *reinterpret_cast<uint64_t*>(cache.pool.base() + page * cache.pool.page_bytes());
  }

  void start() {
    Model::Run& run = runs.emplace_back(cache.sequence());
    run.space = static_cast<int32_t>(random() % spaces.size());
    const size_t blocks = 1 + random() % 6;
    for (size_t i = 0; i < blocks * kBlock; ++i) {  // few ways to go on, so that runs meet
      run.tokens.push_back(i % kBlock == 0 ? static_cast<int32_t>(random() % 2) : 0);
    }
    run.tokens.resize(run.tokens.size() - random() % kBlock);
    size_t expected = 0;
    while ((expected + 1) * kBlock <= run.tokens.size() - 1 && model.entries.count(Model::key(run, expected + 1)) > 0) {
      ++model.entries.at(Model::key(run, ++expected)).holders;
    }
    run.held = expected;
    const auto limit = static_cast<int32_t>(run.tokens.size()) - 1;
    PrefixSpace* space = spaces[static_cast<size_t>(run.space)];
    REQUIRE(cache.prefix.adopt(run.kv, space, run.tokens.data(), limit) == static_cast<int32_t>(expected) * kBlock);
    hits += expected;
    for (size_t i = 0; i < expected; ++i) {
      REQUIRE(content(run, i) == model.entries.at(Model::key(run, i + 1)).content);
    }
    while (!run.kv.try_extend(cache.geometry, static_cast<int64_t>(run.tokens.size()))) {
      if (model.num_idle() == 0) {
        REQUIRE(!cache.prefix.evict());
        finish(std::prev(runs.end()));
        return;
      }
      REQUIRE(cache.prefix.evict());
      model.evict();
    }
  }

  void advance(Model::Run& run) {
    const auto length = static_cast<size_t>(run.kv.length);
    const size_t next = std::min(run.tokens.size(), length + 1 + random() % 9);
    run.kv.length = static_cast<int32_t>(next);
    const size_t held = run.held;
    for (size_t block = held; block < next / kBlock; ++block) {
      content(run, block) = random();
    }
    cache.prefix.insert(run.kv, spaces[static_cast<size_t>(run.space)], run.tokens.data());
    for (size_t block = held; block < next / kBlock; ++block) {
      const auto [at, is_new] = model.entries.try_emplace(Model::key(run, ++run.held));
      ++at->second.holders;
      if (is_new) {
        at->second.content = content(run, block);
      }
      REQUIRE(content(run, block) == at->second.content);
    }
  }

  void finish(std::list<Model::Run>::iterator run) {
    model.keep(*run, 0);
    run->kv.truncate(cache.geometry, 0);
    runs.erase(run);
  }

  void rewind(Model::Run& run) {
    const auto length = static_cast<int32_t>(random() % static_cast<unsigned>(run.kv.length + 1)) / kBlock * kBlock;
    model.keep(run, static_cast<size_t>(length / kBlock));
    run.kv.truncate(cache.geometry, length);
    run.tokens.resize(static_cast<size_t>(std::max(1, length)));
  }

  void fork(const Model::Run& run) {
    Model::Run& copy = runs.emplace_back(cache.sequence());
    copy.space = run.space;
    copy.tokens = run.tokens;
    copy.held = run.held;
    for (size_t i = 1; i <= run.held; ++i) {
      ++model.entries.at(Model::key(run, i)).holders;
    }
    copy.kv.fork_from(cache.geometry, run.kv);
    copy.tokens.resize(std::max<size_t>(1, run.held * kBlock));
  }

  void step() {
    const unsigned what = random() % 16;
    auto at = runs.begin();
    std::advance(at, runs.empty() ? 0 : random() % runs.size());
    if (runs.empty() || what < 4) {
      start();
    } else if (what < 11) {
      advance(*at);
    } else if (what < 14) {
      finish(at);
    } else if (what == 14) {
      rewind(*at);
    } else {
      fork(*at);
    }
    REQUIRE(cache.prefix.num_blocks() == static_cast<int32_t>(model.entries.size()));
    REQUIRE(cache.prefix.num_idle_pages() == static_cast<int32_t>(model.num_idle()) * cache.groups);
    cache.audit();
  }

  Cache cache;
  std::mt19937 random;
  std::vector<PrefixSpace*> spaces;
  std::list<Model::Run> runs;
  Model model;
  size_t hits = 0;
};

}  // namespace

TEST_CASE("random churn agrees with a map of what must be cached", "[prefix_cache]") {
  for (const uint64_t mask : {~uint64_t{0}, uint64_t{7}}) {
    for (const unsigned seed : {1u, 2u, 3u}) {
      INFO("seed " << seed << " mask " << mask);
      Churn churn(mask, seed);
      for (int i = 0; i < 4000; ++i) {
        churn.step();
      }
      CHECK(churn.hits > 300);
      CHECK(churn.cache.prefix.num_evictions() > 200);
      while (!churn.runs.empty()) {
        churn.finish(churn.runs.begin());
      }
      CHECK(churn.cache.prefix.num_idle_pages() == churn.cache.pool.num_used(PageUse::kKv));
    }
  }
}

}  // namespace moelora::test
