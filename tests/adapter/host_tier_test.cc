// SPDX-License-Identifier: Apache-2.0
// HostTier: what stays within a budget, what leaves first, and that what comes back is what left or is refused.
#include "runtime/adapter/host_tier.h"

#include <chrono>

#include "runtime/adapter/adapter.h"
#include "runtime/adapter/load_cache.h"
#include "tests/support/adapter_folder.h"
#include "tests/support/catch.h"
#include "tests/support/comes_true.h"
#include "tests/support/expect_error.h"

namespace moelora::test {
namespace {

struct Tier {
  explicit Tier(uint64_t budget, int64_t rate = 0, std::function<void()> on_read = nullptr)
      : tier(budget, &model, std::move(on_read), rate) {}

  std::shared_ptr<TieredImage> folder(const std::string& name, int32_t rank = 8, uint32_t seed = 1) {
    write_adapter_folder(dir.file(name), model, rank, seed);
    AdapterLoadOptions options;
    options.cache = cache;
    return add(load_adapter_dir(dir.file(name), model, options));
  }
  std::shared_ptr<TieredImage> random(uint64_t seed, int32_t rank = 8) {
    return add(random_adapter(model, rank, true, false, seed));
  }
  std::shared_ptr<TieredImage> add(std::shared_ptr<const AdapterImage> image) {
    auto tiered = std::make_shared<TieredImage>(std::move(image));
    tier.add(tiered);
    tier.audit();
    return tiered;
  }
  // Until the copy is there, or the read failed.
  bool bring(const std::shared_ptr<TieredImage>& image, std::vector<FailedLoad>* failures = nullptr) {
    std::vector<FailedLoad> failed;
    bool is_there = false;
    comes_true([&] {
      tier.poll(failed);
      is_there = failed.empty() && tier.fetch(image, Evict::kAny) != nullptr && image->host != nullptr;
      tier.audit();
      return is_there || !failed.empty();
    });
    if (failures != nullptr) {
      *failures = failed;
    }
    return is_there;
  }
  void use(const std::shared_ptr<TieredImage>& image) {
    REQUIRE(bring(image));
    tier.begin_upload(*image);
    end_upload(*image);
  }

  void end_upload(TieredImage& image) {
    std::vector<FailedLoad> failed;
    tier.end_upload(image, failed);
    REQUIRE(failed.empty());
  }

  TempDir dir;
  ModelConfig model = tiny_moe();
  std::shared_ptr<LoadCache> cache = std::make_shared<LoadCache>();
  HostTier tier;
};

uint64_t bytes_of_rank(int32_t rank) {
  const TempDir dir;
  const ModelConfig model = tiny_moe();
  return load_adapter_dir(write_adapter_folder(dir.file("a"), model, rank, 1), model, {})->stream.size();
}

std::vector<std::byte> bytes_of(const AdapterImage& image) {
  return {image.stream.begin(), image.stream.end()};
}

}  // namespace

TEST_CASE("without a budget every copy stays") {
  Tier tier(0);
  for (uint32_t i = 0; i < 20; ++i) {
    const auto image = tier.folder("a" + std::to_string(i), 8, i);
    CHECK(image->host != nullptr);
  }
  CHECK(tier.tier.stats().images == 20);
  CHECK(tier.tier.stats().images_on_disk == 0);
  CHECK(tier.tier.stats().bytes == 20 * bytes_of_rank(8));
}

TEST_CASE("beyond the budget facts stay and bytes are read again, the same as before") {
  const uint64_t bytes = bytes_of_rank(8);
  Tier tier(3 * bytes + bytes / 2);
  std::vector<std::shared_ptr<TieredImage>> images;
  for (uint32_t i = 0; i < 8; ++i) {
    images.push_back(tier.folder("a" + std::to_string(i), 8, i));
    CHECK((images.back()->host != nullptr) == (i < 3));  // registering drops nothing of others
    CHECK(images.back()->stream_bytes == bytes);
    CHECK(images.back()->max_rank == 8);
  }
  CHECK(tier.tier.stats().images == 3);
  CHECK(tier.tier.stats().images_on_disk == 5);
  for (int round = 0; round < 3; ++round) {
    for (uint32_t i = 0; i < 8; ++i) {
      REQUIRE(tier.bring(images[i]));
      const auto fresh = load_adapter_dir(tier.dir.file("a" + std::to_string(i)), tier.model, {});
      CHECK(bytes_of(*images[i]->host) == bytes_of(*fresh));
      CHECK(tier.tier.stats().bytes <= 3 * bytes + bytes / 2);
      tier.tier.audit();
    }
  }
  CHECK(tier.tier.stats().loads >= 3 * 8 - 3);
  CHECK(tier.tier.stats().evictions == tier.tier.stats().loads);
  CHECK(tier.tier.stats().read_ms > 0);
  CHECK(tier.tier.stats().pack_ms > 0);
}

TEST_CASE("the least recently used copy of equal cost leaves first; one in use, or pinned for the device, stays") {
  const uint64_t bytes = bytes_of_rank(8);
  Tier tier(3 * bytes);
  std::vector<std::shared_ptr<TieredImage>> images;
  for (uint32_t i = 0; i < 7; ++i) {
    images.push_back(tier.folder("a" + std::to_string(i), 8, i));
  }
  const auto in_host = [&](size_t i) { return images[i]->host != nullptr; };
  tier.use(images[2]);
  tier.use(images[0]);
  tier.use(images[1]);
  tier.use(images[3]);
  CHECK(!in_host(2));  // the oldest of 2, 0, 1
  tier.tier.note_use(*images[0]);
  tier.use(images[4]);
  CHECK(!in_host(1));
  CHECK(in_host(0));
  tier.tier.begin_upload(*images[0]);
  tier.use(images[5]);  // the copies are now of 0, 4 and 5
  tier.use(images[6]);
  CHECK(in_host(0));
  CHECK(!in_host(4));
  tier.end_upload(*images[0]);
  // Of 0, 5 and 6, 0 is the oldest; pinned, it waits here for a place on the device.
  Adapter adapter;
  adapter.image = images[0];
  adapter.pins = 1;
  images[0]->adapters.push_back(&adapter);
  tier.use(images[1]);
  CHECK(in_host(0));
  CHECK(!in_host(5));
  images[0]->slot = 1;  // it is there: the pin needs no host copy
  tier.use(images[2]);
  CHECK(!in_host(0));
  images[0]->slot = 0;
  images[0]->adapters.clear();
}

TEST_CASE("a copy that is dear for its size stays longer, but not for ever") {
  const uint64_t small = bytes_of_rank(8);
  const uint64_t large = bytes_of_rank(64);
  REQUIRE(large > 6 * small);
  Tier tier(small + 2 * large);
  const auto cheap = tier.folder("small", 8, 1);
  const auto first = tier.folder("first", 64, 2);
  const auto second = tier.folder("second", 64, 3);
  tier.use(cheap);
  tier.use(first);
  tier.use(second);
  const auto third = tier.folder("third", 64, 4);
  tier.use(third);
  CHECK(cheap->host != nullptr);  // the oldest, but opening its files costs what opening theirs does
  CHECK(first->host == nullptr);
  int uses = 0;
  for (; uses < 100 && cheap->host != nullptr; ++uses) {
    tier.use(uses % 3 == 0 ? first : uses % 3 == 1 ? second : third);
  }
  CHECK(uses > 2);
  CHECK(uses < 100);
}

TEST_CASE("what cannot be read again is refused where the budget could not hold it, with the numbers") {
  const uint64_t bytes = bytes_of_rank(8);
  Tier tier(3 * bytes);
  const auto folder = tier.folder("a", 8, 1);
  const auto memory = random_adapter(tier.model, 8, true, false, 1)->stream.size();
  REQUIRE(memory <= bytes);  // bf16, where the folder's fp32 pairs stay fp32
  std::vector<std::shared_ptr<TieredImage>> held;
  while ((held.size() + 1) * memory + bytes <= 3 * bytes) {
    held.push_back(tier.random(held.size()));
    CHECK(held.back()->host != nullptr);
  }
  CHECK_ERROR(Status::kNomem, ({std::to_string(memory), "host_memory_bytes = " + std::to_string(3 * bytes)}),
              tier.random(99));
  tier.tier.audit();
  CHECK(tier.bring(folder));  // there is always room for the largest
  write_adapter_folder(tier.dir.file("huge"), tier.model, 64, 1);
  CHECK_ERROR(Status::kNomem, ({"host_memory_bytes"}),
              tier.add(load_adapter_dir(tier.dir.file("huge"), tier.model, {})));
  for (const auto& image : held) {
    tier.tier.remove(*image);
  }
  tier.tier.audit();
  CHECK(tier.random(99)->host != nullptr);
}

TEST_CASE("what was loaded by its header is on disk until it is wanted, and its first read says what it is") {
  const uint64_t bytes = bytes_of_rank(8);
  Tier tier(bytes);
  const std::string path = write_adapter_folder(tier.dir.file("a"), tier.model, 8, 1);
  const auto whole = load_adapter_dir(path, tier.model, {});
  const auto described = describe_adapter_dir(path, tier.model, {});
  CHECK(described->stream.size() == 0);
  CHECK(described->fingerprint == 0);
  CHECK(described->stream_bytes == whole->stream.size());
  CHECK(described->header_fingerprint == whole->header_fingerprint);
  CHECK(described->modules == whole->modules);
  CHECK(described->max_rank == whole->max_rank);
  CHECK(described->dir == whole->dir);
  const auto lazy = tier.add(described);
  CHECK(tier.tier.stats().bytes == 0);
  CHECK(tier.tier.stats().images_on_disk == 1);
  REQUIRE(tier.bring(lazy));
  CHECK(bytes_of(*lazy->host) == bytes_of(*whole));
  CHECK(lazy->fingerprint == whole->fingerprint);
  CHECK(tier.tier.stats().images_on_disk == 0);
  // From then on it must stay what it was.
  tier.use(lazy);
  const auto other = tier.folder("b", 8, 2);
  tier.use(other);
  CHECK(lazy->host == nullptr);
  write_adapter_folder(tier.dir.file("a"), tier.model, 8, 3);
  std::vector<FailedLoad> failed;
  CHECK(!tier.bring(lazy, &failed));
  REQUIRE(failed.size() == 1);
  CHECK(failed[0].status == Status::kIo);
}

TEST_CASE("values at fault in what was loaded by its header are found by its first read") {
  Tier tier(0);
  const std::string path = write_adapter_folder(tier.dir.file("a"), tier.model, 8, 1);
  const std::string weights = path + "/adapter_model.safetensors";
  const std::string text = read_file(weights);
  const auto lazy = tier.add(describe_adapter_dir(path, tier.model, {}));
  write_file(weights, text.substr(0, text.size() - 4) + "\xff\xff\xff\x7f");  // NaN, of whatever width
  std::vector<FailedLoad> failed;
  CHECK(!tier.bring(lazy, &failed));
  REQUIRE(failed.size() == 1);
  CHECK(failed[0].status == Status::kAdapterMismatch);
  CHECK(failed[0].message.find("NaN") != std::string::npos);
  CHECK(failed[0].message.find(weights) != std::string::npos);
  write_file(weights, text);
  CHECK(tier.bring(lazy));
}

TEST_CASE("files that changed, broke or went are refused by name, and others come as before") {
  const uint64_t bytes = bytes_of_rank(8);
  Tier tier(bytes);
  const auto kept = tier.folder("kept", 8, 1);
  const auto weights = tier.folder("weights", 8, 2);
  const auto config = tier.folder("config", 8, 3);
  const auto cut = tier.folder("cut", 8, 4);
  const auto gone = tier.folder("gone", 8, 5);
  const auto touched = tier.folder("touched", 8, 6);
  write_adapter_folder(tier.dir.file("weights"), tier.model, 8, 7);
  write_adapter_folder(tier.dir.file("config"), tier.model, 8, 3, 17.0);
  const std::string text = read_file(tier.dir.file("cut/adapter_model.safetensors"));
  write_file(tier.dir.file("cut/adapter_model.safetensors"), text.substr(0, text.size() / 2));
  std::filesystem::remove(tier.dir.file("gone/adapter_model.safetensors"));
  write_adapter_folder(tier.dir.file("touched"), tier.model, 8, 6);  // the same bytes in a newer file
  const struct {
    std::shared_ptr<TieredImage> image;
    const char* file;
    const char* said;
  } cases[] = {{weights, "weights/adapter_model.safetensors", "changed"},
               {config, "config/adapter_config.json", "changed"},
               {cut, "cut/adapter_model.safetensors", "changed"},
               {gone, "gone/adapter_model.safetensors", "cannot open"}};
  for (const auto& one : cases) {
    INFO(one.file);
    std::vector<FailedLoad> failed;
    REQUIRE(!tier.bring(one.image, &failed));
    REQUIRE(failed.size() == 1);
    CHECK(failed[0].image == one.image);
    CHECK(failed[0].status == Status::kIo);
    CHECK(failed[0].message.find(tier.dir.file(one.file)) != std::string::npos);
    CHECK(failed[0].message.find(one.said) != std::string::npos);
    CHECK(one.image->host == nullptr);
    tier.tier.audit();
  }
  CHECK(tier.bring(touched));
  CHECK(tier.bring(kept));
  write_adapter_folder(tier.dir.file("weights"), tier.model, 8, 2);  // as it was
  CHECK(tier.bring(weights));
}

TEST_CASE("copies are freed when they are dropped and when their image goes") {
  const uint64_t bytes = bytes_of_rank(8);
  Tier tier(2 * bytes);
  auto first = tier.folder("first", 8, 1);
  const auto second = tier.folder("second", 8, 2);
  const auto third = tier.folder("third", 8, 3);
  const std::weak_ptr<const AdapterImage> first_copy = first->host;
  const std::weak_ptr<const AdapterImage> second_copy = second->host;
  // The memory of what was evicted serves the next read, or goes with the first image that does.
  HostBytes memory;
  CHECK(comes_true([&] { return !(memory = tier.cache->take_memory(bytes)).empty(); }));  // the third's
  CHECK(tier.bring(third));
  CHECK(comes_true([&] { return first_copy.expired(); }));
  CHECK(tier.cache->take_memory(bytes).empty());
  tier.cache->keep_memory(std::move(memory));
  tier.tier.remove(*second);
  CHECK(comes_true([&] { return second_copy.expired(); }));
  CHECK(tier.cache->take_memory(bytes).empty());
  CHECK(tier.tier.stats().bytes == bytes);
  tier.tier.remove(*first);
  tier.tier.remove(*third);
  CHECK(tier.tier.stats().bytes == 0);
  CHECK(tier.tier.stats().images == 0);
  CHECK(tier.tier.stats().images_on_disk == 0);
  CHECK(tier.tier.images().empty());
}

TEST_CASE("what is being read can be uploaded before it is whole") {
  const uint64_t bytes = bytes_of_rank(8);
  std::atomic<int> calls{0};
  std::atomic<bool> goes_on{false};
  Tier tier(bytes, 0, [&] {
    if (++calls % 2 == 1) {  // its stream has been laid out
      comes_true([&] { return goes_on.load(); });
    }
  });
  const auto first = tier.folder("first", 8, 1);
  const auto second = tier.folder("second", 8, 2);
  for (const bool changed : {false, true}) {
    const auto& image = changed ? first : second;
    REQUIRE(image->host == nullptr);
    goes_on = false;
    const int calls_before = calls;
    CHECK(tier.tier.fetch(image, Evict::kAny) == nullptr);
    REQUIRE(comes_true([&] { return calls > calls_before; }));
    std::vector<FailedLoad> failed;
    tier.tier.poll(failed);
    const std::shared_ptr<const AdapterImage> growing = tier.tier.fetch(image, Evict::kAny);
    REQUIRE(growing != nullptr);
    CHECK(growing->stream.size() == bytes);
    CHECK(growing->progress.is_growing());
    CHECK(!growing->progress.wait_for(bytes, {}));
    CHECK(image->host == nullptr);
    tier.tier.begin_upload(*image);
    tier.tier.audit();
    if (changed) {
      write_adapter_folder(tier.dir.file("first"), tier.model, 8, 7);
    }
    goes_on = true;
    REQUIRE(comes_true([&] { return !growing->progress.is_growing(); }));
    CHECK(growing->progress.wait_for(bytes, {}) == !changed);
    tier.tier.end_upload(*image, failed);  // whoever has copied all of it finds the read ended
    tier.tier.audit();
    CHECK(image->host == (changed ? nullptr : growing));
    CHECK(failed.size() == (changed ? 1 : 0));
    CHECK(tier.tier.stats().loads == 1);
  }
}

TEST_CASE("a bound on the rate of reading; stopping ends the wait") {
  const uint64_t bytes = bytes_of_rank(8);
  Tier tier(2 * bytes, static_cast<int64_t>(bytes * 20));  // 50 ms each
  std::vector<std::shared_ptr<TieredImage>> images;
  for (uint32_t i = 0; i < 6; ++i) {
    images.push_back(tier.folder("a" + std::to_string(i), 8, i));
  }
  const auto begun = std::chrono::steady_clock::now();
  for (size_t i = 2; i < 6; ++i) {
    REQUIRE(tier.bring(images[i]));
  }
  CHECK(std::chrono::steady_clock::now() - begun >= std::chrono::milliseconds(150));
  CHECK(tier.tier.fetch(images[0], Evict::kAny) == nullptr);
  tier.tier.stop();
}

}  // namespace moelora::test
