// SPDX-License-Identifier: Apache-2.0
// AdapterUploader: every byte of a stream of many chunks lands in the right page and nowhere else, uploads come back in
// order, and one that is stopped or fails says so.
#include "runtime/adapter/adapter_uploader.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/comes_true.h"
#include "tests/support/test_device.h"

namespace moelora::test {
namespace {

constexpr int64_t kPage = 48 << 10;  // does not divide a chunk's wish
constexpr int32_t kPages = 200;

std::shared_ptr<AdapterImage> image_of(size_t bytes, unsigned seed) {
  auto image = std::make_shared<AdapterImage>();
  image->stream.resize(bytes);
  std::mt19937 random(seed);
  std::generate(image->stream.begin(), image->stream.end(), [&] { return static_cast<std::byte>(random() & 0xff); });
  return image;
}

// Pages for all that a test uploads, on a CPU whose chunks the plan hears of.
struct Pages {
  std::shared_ptr<TestDevice::Plan> plan = std::make_shared<TestDevice::Plan>();
  std::unique_ptr<Device> device = TestDevice::wrapper(plan)(open_device_cpu());
  PagePool pool{kPages, kPage, *device};
  std::vector<PageId> ids = std::vector<PageId>(kPages);

  Pages() { REQUIRE(pool.try_reserve(PageUse::kAdapter, ids.data(), kPages)); }
  ~Pages() { pool.release(ids.data(), kPages); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
};

Upload take(AdapterUploader& uploader) {
  Upload upload;
  while (!uploader.take(&upload)) {
    std::this_thread::yield();
  }
  return upload;
}

}  // namespace

TEST_CASE("uploads: all bytes to their pages, in order") {
  const auto device = open_device_cpu();
  PagePool pool(kPages, kPage, *device);
  std::memset(pool.base(), 0xff, static_cast<size_t>(kPages * kPage));
  std::vector<PageId> ids(kPages);
  REQUIRE(pool.try_reserve(PageUse::kAdapter, ids.data(), kPages));
  std::shuffle(ids.begin(), ids.end(), std::mt19937(3));
  std::vector<std::byte> expected(static_cast<size_t>(kPages * kPage), std::byte{0xff});
  std::atomic<int> woken{0};
  AdapterUploader uploader(pool, *device, kernels_cpu(), [&] { ++woken; });
  const size_t sizes[] = {1024, 5 * static_cast<size_t>(kPage), (4 << 20) + 1024, 2 << 20};
  size_t first_page = 0;
  for (size_t i = 0; i < 4; ++i) {
    CHECK(!uploader.is_full());
    const auto image = image_of(sizes[i], static_cast<unsigned>(i));
    for (size_t at = 0; at < sizes[i]; ++at) {
      const auto page = static_cast<size_t>(ids[first_page + at / kPage]);
      expected[page * kPage + at % kPage] = image->stream[at];
    }
    uploader.add(static_cast<int32_t>(i) + 1, image, ids.data() + first_page);
    first_page += sizes[i] / kPage + 1;
  }
  for (int32_t slot = 1; slot <= 4; ++slot) {
    const Upload upload = take(uploader);
    CHECK(upload.slot == slot);
    CHECK(upload.status == Status::kOk);
  }
  Upload none;
  CHECK(!uploader.take(&none));
  uploader.stop();
  CHECK(woken == 4);
  CHECK(std::memcmp(pool.base(), expected.data(), expected.size()) == 0);
  pool.release(ids.data(), kPages);
}

TEST_CASE("uploads: a few large ones or many small ones may be on their way") {
  Pages pages;
  AdapterUploader uploader(pages.pool, *pages.device, kernels_cpu(), nullptr);
  // Nobody fills these streams, so that no byte of them is copied.
  const auto waiting = [](size_t bytes) {
    auto image = std::make_shared<AdapterImage>();
    image->stream.resize(bytes);
    image->progress.begin();
    return image;
  };
  const auto add_until_full = [&](size_t bytes, int32_t most) {
    const auto image = waiting(bytes);
    int32_t count = 0;
    for (; !uploader.is_full() && count < most; ++count) {
      uploader.add(count + 1, image, pages.ids.data());
    }
    return count;
  };
  const auto empty = [&] {
    while (!uploader.is_empty()) {
      for (int32_t slot = 1; slot <= 40; ++slot) {
        uploader.cancel(slot);
      }
      CHECK(take(uploader).status == Status::kCancelled);
    }
    CHECK(!uploader.is_full());
  };
  const size_t mib = size_t{1} << 20;
  CHECK(add_until_full(300 * mib, 40) == 4);
  empty();
  CHECK(add_until_full(32 * mib, 40) == 8);
  uploader.cancel(1);
  CHECK(take(uploader).slot == 1);
  CHECK(!uploader.is_full());
  empty();
  CHECK(add_until_full(1 * mib, 40) == 32);
  empty();
}

TEST_CASE("uploads: a failed one does not spoil the next, a stopped one is not taken for done") {
  Pages pages;
  std::atomic<int> chunks{0};
  std::atomic<bool> at_gate{false};
  std::atomic<bool> open{false};
  pages.plan->chunk_queued = [&] {
    const int chunk = ++chunks;
    if (chunk == 3) {
      throw Error(Status::kCuda, "made to fail");
    }
    if (chunk == 9) {
      at_gate = true;
      while (!open) {
        std::this_thread::yield();
      }
    }
  };
  AdapterUploader uploader(pages.pool, *pages.device, kernels_cpu(), nullptr);
  uploader.add(1, image_of(4 << 20, 1), pages.ids.data());
  uploader.add(2, image_of(4 << 20, 2), pages.ids.data());
  uploader.add(3, image_of(4 << 20, 3), pages.ids.data());
  const Upload failed = take(uploader);
  CHECK(failed.status == Status::kCuda);
  CHECK(failed.message.find("made to fail") != std::string::npos);
  CHECK(take(uploader).status == Status::kOk);
  while (!at_gate) {
    std::this_thread::yield();
  }
  std::thread stopper([&] { uploader.stop(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  open = true;
  stopper.join();
  CHECK(take(uploader).status == Status::kClosed);
  CHECK(chunks == 9);
}

TEST_CASE("uploads: what was taken is not kept, what nobody needs is not copied") {
  Pages pages;
  std::atomic<int> chunks{0};
  std::atomic<bool> open{false};
  pages.plan->chunk_queued = [&] {
    ++chunks;
    while (!open) {
      std::this_thread::yield();
    }
  };
  AdapterUploader uploader(pages.pool, *pages.device, kernels_cpu(), nullptr);
  std::vector<std::weak_ptr<const AdapterImage>> images;
  for (int32_t slot = 1; slot <= 4; ++slot) {
    const auto image = image_of(slot == 2 ? 4 << 20 : 1 << 10, static_cast<unsigned>(slot));
    images.push_back(image);
    uploader.add(slot, image, pages.ids.data());
  }
  while (chunks == 0) {
    std::this_thread::yield();
  }
  uploader.cancel(2);  // waits behind the first
  uploader.cancel(7);  // nobody's
  open = true;
  Upload upload;  // one for all, as a careless caller has it
  for (int32_t slot = 1; slot <= 4; ++slot) {
    while (!uploader.take(&upload)) {
      std::this_thread::yield();
    }
    CHECK(upload.slot == slot);
    CHECK(upload.status == (slot == 2 ? Status::kCancelled : Status::kOk));
  }
  CHECK(chunks == 3);
  upload = {};
  for (const auto& image : images) {
    CHECK(image.expired());
  }
  open = false;  // one whose place in the ring was cancelled before is not
  uploader.add(5, image_of(4 << 20, 5), pages.ids.data());
  uploader.add(6, image_of(4 << 20, 6), pages.ids.data());
  while (chunks == 3) {
    std::this_thread::yield();
  }
  uploader.cancel(5);  // between two chunks
  open = true;
  CHECK(take(uploader).status == Status::kCancelled);
  CHECK(take(uploader).status == Status::kOk);
  CHECK(chunks < 3 + 5 + 5);
}

TEST_CASE("uploads: a bound on the rate, whose waits end with the upload") {
  using Clock = std::chrono::steady_clock;
  Pages pages;
  {
    AdapterUploader uploader(pages.pool, *pages.device, kernels_cpu(), nullptr, 40 << 20);
    const auto start = Clock::now();
    uploader.add(1, image_of(4 << 20, 1), pages.ids.data());
    uploader.add(2, image_of(4 << 20, 2), pages.ids.data());
    CHECK(take(uploader).status == Status::kOk);
    CHECK(take(uploader).status == Status::kOk);
    // All but the last chunk, of at most 1 MiB, have had their time.
    CHECK(Clock::now() - start >= std::chrono::milliseconds(7 * 1000 / 40));
    CHECK(std::memcmp(pages.pool.base() + pages.ids[1] * kPage, image_of(4 << 20, 2)->stream.data() + kPage, kPage) ==
          0);
  }
  AdapterUploader uploader(pages.pool, *pages.device, kernels_cpu(), nullptr, 1);  // a chunk takes days
  uploader.add(1, image_of(1 << 10, 1), pages.ids.data());                         // it owes nothing
  CHECK(take(uploader).status == Status::kOk);
  uploader.add(2, image_of(4 << 20, 2), pages.ids.data());
  uploader.add(3, image_of(4 << 20, 3), pages.ids.data());
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  Upload none;
  CHECK(!uploader.take(&none));
  uploader.cancel(2);
  CHECK(take(uploader).status == Status::kCancelled);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(!uploader.take(&none));
  uploader.stop();
  CHECK(take(uploader).status == Status::kClosed);
}

TEST_CASE("uploads: a stream is copied as far as it is made, to its end only when it is whole") {
  Pages pages;
  std::atomic<int> chunks{0};
  pages.plan->chunk_queued = [&] { ++chunks; };
  AdapterUploader uploader(pages.pool, *pages.device, kernels_cpu(), nullptr);
  const auto image = image_of(4 << 20, 1);
  const std::vector<std::byte> bytes(image->stream.begin(), image->stream.end());
  std::fill(image->stream.begin(), image->stream.end(), std::byte{0});
  image->progress.begin();
  uploader.add(1, image, pages.ids.data());
  CHECK(!uploader.is_working());  // it waits
  CHECK(chunks == 0);
  const size_t chunk = (1 << 20) / kPage * kPage;
  const size_t half = 2 * chunk + 100;
  std::copy(bytes.begin(), bytes.begin() + half, image->stream.begin());
  image->progress.publish(half);
  REQUIRE(comes_true([&] { return chunks == 2 && !uploader.is_working(); }));
  std::copy(bytes.begin() + half, bytes.end(), image->stream.begin() + half);
  image->progress.publish(bytes.size() - 1);
  REQUIRE(comes_true([&] { return chunks == static_cast<int>((bytes.size() - 1) / chunk) && !uploader.is_working(); }));
  Upload none;
  CHECK(!uploader.take(&none));
  image->progress.finish();
  CHECK(take(uploader).status == Status::kOk);
  for (size_t at = 0; at < bytes.size(); at += kPage) {
    const auto page = static_cast<size_t>(pages.ids[at / kPage]);
    CHECK(std::memcmp(pages.pool.base() + page * kPage, bytes.data() + at,
                      std::min<size_t>(kPage, bytes.size() - at)) == 0);
  }
}

TEST_CASE("uploads: whole streams pass those that wait for theirs, which go on in their order") {
  Pages pages;
  AdapterUploader uploader(pages.pool, *pages.device, kernels_cpu(), nullptr);
  std::vector<std::shared_ptr<AdapterImage>> growing;
  for (int32_t slot = 1; slot <= 4; ++slot) {
    const auto image = image_of(3 << 20, static_cast<unsigned>(slot));
    if (slot != 3) {
      growing.push_back(image);
      image->progress.begin();
      image->progress.publish(slot == 1 ? 2 << 20 : 0);
    }
    uploader.add(slot, image, pages.ids.data());
  }
  CHECK(take(uploader).slot == 3);
  growing[1]->progress.finish();
  CHECK(take(uploader).slot == 2);
  REQUIRE(comes_true([&] { return !uploader.is_working(); }));
  uploader.add(5, image_of(1 << 10, 5), pages.ids.data());
  CHECK(take(uploader).slot == 5);
  growing[2]->progress.finish();
  growing[0]->progress.finish();
  int32_t slots = 0;
  for (int i = 0; i < 2; ++i) {
    const Upload upload = take(uploader);
    CHECK(upload.status == Status::kOk);
    CHECK(upload.image->stream.size() == 3 << 20);
    slots += upload.slot;
  }
  CHECK(slots == 1 + 4);
  CHECK(uploader.is_empty());
}

TEST_CASE("uploads: one whose stream fails, is given up or meets the end does not wait") {
  Pages pages;
  AdapterUploader uploader(pages.pool, *pages.device, kernels_cpu(), nullptr);
  const auto growing = [&](int32_t slot) {
    const auto image = image_of(4 << 20, static_cast<unsigned>(slot));
    image->progress.begin();
    image->progress.publish(2 << 20);
    uploader.add(slot, image, pages.ids.data());
    return image;
  };
  const auto failed = growing(1);
  growing(2);
  uploader.add(3, image_of(1 << 10, 3), pages.ids.data());
  CHECK(take(uploader).status == Status::kOk);  // it need not wait for them
  REQUIRE(comes_true([&] { return !uploader.is_working(); }));
  failed->progress.fail();
  CHECK(take(uploader).status == Status::kCancelled);
  REQUIRE(comes_true([&] { return !uploader.is_working(); }));
  uploader.cancel(2);
  CHECK(take(uploader).status == Status::kCancelled);
  growing(4);
  REQUIRE(comes_true([&] { return !uploader.is_working(); }));
  uploader.stop();
  Upload none;
  CHECK(!uploader.take(&none));
}

}  // namespace moelora::test
