// SPDX-License-Identifier: Apache-2.0
// AdapterCache: what leaves the device first, what unloading frees and when, and a registry of thousands.
#include "runtime/adapter/adapter_cache.h"

#include <chrono>
#include <thread>

#include "tests/support/adapter_folder.h"
#include "tests/support/catch.h"
#include "tests/support/comes_true.h"
#include "tests/support/expect_error.h"

namespace moelora::test {
namespace {

constexpr int64_t kPage = 2048;

struct Cache {
  explicit Cache(int32_t slots, int32_t pages = 4096, uint64_t host_bytes = 0)
      : pool(pages, kPage, *device),
        cache({slots, model.num_layers, model.num_experts, 0, host_bytes, &model}, pool, kernels_cpu(), *device,
              nullptr) {}

  std::shared_ptr<Adapter> add(std::shared_ptr<TieredImage> image, const std::string& name = "a") {
    auto adapter = std::make_shared<Adapter>();
    adapter->id = ++last_id;
    adapter->name = name;
    adapter->image = std::move(image);
    cache.add(adapter);
    return adapter;
  }
  std::shared_ptr<Adapter> random(uint64_t seed, int32_t rank = 8, const std::string& name = "a") {
    return add(std::make_shared<TieredImage>(random_adapter(model, rank, true, false, seed)), name);
  }
  std::shared_ptr<Adapter> folder(const std::string& name, uint32_t seed) {
    write_adapter_folder(dir.file(name), model, 8, seed);
    return add(std::make_shared<TieredImage>(load_adapter_dir(dir.file(name), model, {})), name);
  }
  void audit() const {
    pool.audit();
    cache.audit();
  }
  void poll() {
    std::vector<FailedLoad> failed;
    cache.poll(failed);
    REQUIRE(failed.empty());
    audit();
  }
  // Brings it to the device, and lets what is idle leave for it.
  void bring(Adapter& adapter) {
    REQUIRE(comes_true([&] {
      poll();
      const Residency residency = cache.place(adapter, 0);
      if (residency == Residency::kShort) {
        REQUIRE(cache.evict_idle());
      }
      return residency == Residency::kResident;
    }));
  }
  void use(Adapter& adapter) {
    bring(adapter);
    cache.release(cache.acquire(adapter));
  }
  [[nodiscard]] std::vector<std::byte> bytes_on_device(const Adapter& adapter) const {
    std::vector<std::byte> bytes(adapter.image->stream_bytes);
    const AdapterTable table = cache.table();
    for (size_t at = 0; at < bytes.size(); at += kGranuleBytes) {
      std::memcpy(bytes.data() + at, table.granule(adapter.slot, static_cast<int32_t>(at / kGranuleBytes)),
                  kGranuleBytes);
    }
    return bytes;
  }

  TempDir dir;
  ModelConfig model = tiny_moe();
  std::unique_ptr<Device> device = open_device_cpu();
  PagePool pool;
  AdapterCache cache;
  uint64_t last_id = 0;
};

std::vector<std::byte> bytes_of(const AdapterImage& image) {
  return {image.stream.begin(), image.stream.end()};
}

}  // namespace

TEST_CASE("device pages, host memory and disk hold the same bytes") {
  Cache cache(2, 4096, 1 << 20);
  const auto from_folder = cache.folder("a", 5);
  const std::string config = read_file(cache.dir.file("a/adapter_config.json"));
  const std::string weights = read_file(cache.dir.file("a/adapter_model.safetensors"));
  const auto from_memory = cache.add(std::make_shared<TieredImage>(load_adapter_memory(
      config, reinterpret_cast<const std::byte*>(weights.data()), weights.size(), cache.model, {})));
  CHECK(bytes_of(*from_folder->image->host) == bytes_of(*from_memory->image->host));
  CHECK(from_folder->image->fingerprint == from_memory->image->fingerprint);
  cache.bring(*from_folder);
  cache.bring(*from_memory);
  const std::vector<std::byte> expected = bytes_of(*from_memory->image->host);
  CHECK(cache.bytes_on_device(*from_folder) == expected);
  CHECK(cache.bytes_on_device(*from_memory) == expected);
  CHECK(from_folder->image->bytes_uploaded == expected.size());
  // A copy, not a view: what happens to the host's does not reach the device.
  auto& host = const_cast<AdapterImage&>(*from_memory->image->host);
  std::fill(host.stream.begin(), host.stream.end(), std::byte{0xff});
  CHECK(cache.bytes_on_device(*from_memory) == expected);
}

TEST_CASE("the wasted bytes are those of the last pages") {
  Cache cache(8);
  int64_t wasted = 0;
  for (int32_t rank = 1; rank <= 6; ++rank) {
    const auto adapter = cache.random(static_cast<uint64_t>(rank), rank * 8);
    cache.bring(*adapter);
    wasted += (kPage - static_cast<int64_t>(adapter->image->host->stream.size()) % kPage) % kPage;
    CHECK(cache.cache.wasted_bytes() == wasted);
  }
  CHECK(wasted > 0);
  while (cache.cache.evict_idle()) {
  }
  CHECK(cache.cache.wasted_bytes() == 0);
  CHECK(cache.pool.num_free() == cache.pool.num_pages());
}

TEST_CASE("the least recently used of equal cost leaves the device first, wanted ones last, those in use never") {
  Cache cache(3);
  std::vector<std::shared_ptr<Adapter>> adapters;
  for (uint64_t i = 0; i < 6; ++i) {
    adapters.push_back(cache.random(i));
  }
  for (const size_t i : {0, 1, 2, 0}) {
    cache.use(*adapters[i]);
  }
  cache.use(*adapters[3]);
  CHECK(adapters[1]->slot == 0);
  CHECK(adapters[0]->slot > 0);
  const int32_t held = cache.cache.acquire(*adapters[2]);
  cache.use(*adapters[0]);
  cache.cache.forget_wanted();
  cache.cache.mark_wanted(*adapters[3]);
  cache.use(*adapters[4]);  // 2 is in use, 3 wanted: 0 leaves although 3 is older
  CHECK(adapters[0]->slot == 0);
  CHECK(adapters[3]->slot > 0);
  adapters[4]->pins = 1;
  CHECK(!cache.cache.evict_idle(Evict::kUnwanted));
  CHECK(cache.cache.evict_idle(Evict::kAny));
  CHECK(adapters[3]->slot == 0);
  CHECK(!cache.cache.evict_idle(Evict::kAny));
  cache.cache.release(held);
  adapters[4]->pins = 0;
  CHECK(cache.cache.evict_idle(Evict::kAny));
  CHECK(adapters[4]->slot == 0);  // the older use
}

TEST_CASE("an image whose host copy is gone leaves the device later than one that is quickly back") {
  const TempDir dir;
  const ModelConfig model = tiny_moe();
  const uint64_t bytes = load_adapter_dir(write_adapter_folder(dir.file("a"), model, 8, 1), model, {})->stream.size();
  Cache cache(2, 4096, bytes);
  const auto first = cache.folder("first", 1);
  const auto second = cache.folder("second", 2);
  cache.use(*first);
  cache.use(*second);
  REQUIRE(first->image->host == nullptr);  // it went for the second's
  REQUIRE(second->image->host != nullptr);
  REQUIRE(cache.cache.evict_idle());
  CHECK(second->slot == 0);
  CHECK(first->slot > 0);
  REQUIRE(cache.cache.evict_idle());
  CHECK(first->slot == 0);
}

TEST_CASE("unloading frees pages, slot and host copy at the last user, and not before") {
  Cache cache(2);
  const auto adapter = cache.random(1);
  const auto clone = cache.add(adapter->image, "b");
  const std::weak_ptr<TieredImage> image = adapter->image;
  const std::weak_ptr<const AdapterImage> copy = adapter->image->host;
  cache.bring(*adapter);
  CHECK(clone->slot == adapter->slot);
  const int32_t slot = cache.cache.acquire(*adapter);
  adapter->in_flight = 1;
  cache.cache.remove(*adapter);
  CHECK(cache.cache.find("a") == nullptr);
  CHECK(cache.cache.find("b") == clone);
  cache.cache.remove(*clone);
  cache.cache.collect();
  cache.audit();
  CHECK(cache.pool.num_used(PageUse::kAdapter) > 0);
  CHECK(cache.cache.host().images == 1);
  cache.poll();
  cache.cache.release(slot);
  adapter->in_flight = 0;
  cache.cache.collect();
  cache.audit();
  CHECK(cache.pool.num_used(PageUse::kAdapter) == 0);
  CHECK(cache.cache.host().images == 0);
  CHECK(cache.cache.host().bytes == 0);
  CHECK(cache.cache.num_registered() == 0);
  CHECK(comes_true([&] { return copy.expired(); }));
  CHECK_ERROR(Status::kNotFound, ({"was unloaded"}), cache.add(adapter->image, "late"));
}

TEST_CASE("unloading while the files are read, or the copy is on its way") {
  const TempDir dir;
  const ModelConfig model = tiny_moe();
  const uint64_t bytes = load_adapter_dir(write_adapter_folder(dir.file("a"), model, 8, 1), model, {})->stream.size();
  for (int round = 0; round < 20; ++round) {
    Cache cache(2, 4096, bytes);
    const auto first = cache.folder("first", 1);
    const auto second = cache.folder("second", 2);
    REQUIRE(second->image->host == nullptr);
    Residency residency = cache.cache.place(*second, 0);
    CHECK(residency == Residency::kLoading);
    for (int i = 0; i < round; ++i) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      cache.poll();
      residency = cache.cache.place(*second, 0);
    }
    cache.cache.remove(*second);
    cache.cache.collect();
    CHECK(comes_true([&] {
      cache.poll();
      return !cache.cache.is_loading() && cache.cache.host().images_on_disk == 1;
    }));
    CHECK(cache.pool.num_free() == cache.pool.num_pages());
    CHECK(cache.cache.host().bytes == 0);
    CHECK(cache.cache.host().images_on_disk == 1);
    cache.use(*first);
  }
}

TEST_CASE("thousands of registered adapters: names, order, clones and counts") {
  Cache cache(4);
  constexpr size_t kAdapters = 5000;
  std::vector<std::shared_ptr<Adapter>> adapters;
  const auto image = std::make_shared<TieredImage>(random_adapter(cache.model, 8, true, false, 1));
  for (size_t i = 0; i < kAdapters; ++i) {
    adapters.push_back(i % 2 == 0 ? cache.random(i, 8, "n" + std::to_string(i))
                                  : cache.add(image, "n" + std::to_string(i)));
  }
  cache.audit();
  CHECK(cache.cache.num_registered() == kAdapters);
  CHECK(cache.cache.host().images == static_cast<int64_t>(kAdapters / 2 + 1));
  CHECK(cache.cache.list() == adapters);
  CHECK(cache.cache.find("n4321") == adapters[4321]);
  cache.use(*adapters[77]);
  CHECK(adapters[4321]->slot == adapters[77]->slot);
  for (size_t i = 0; i < kAdapters; i += 2) {
    cache.cache.remove(*adapters[i]);
  }
  cache.audit();
  CHECK(cache.cache.host().images == 1);
  CHECK(cache.cache.find("n4322") == nullptr);
  CHECK(cache.cache.num_registered() == kAdapters / 2);
}

}  // namespace moelora::test
