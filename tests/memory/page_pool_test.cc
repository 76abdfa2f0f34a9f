// SPDX-License-Identifier: Apache-2.0
// The pool against a model that a reader can check: a map from page to owner, over random leases.
#include "runtime/memory/page_pool.h"

#include <map>
#include <random>
#include <vector>

#include "kernels/base/error.h"
#include "tests/support/catch.h"

namespace moelora::test {

TEST_CASE("every page is handed out once, all or nothing", "[page_pool]") {
  const auto device = open_device_cpu();
  PagePool pool(10, 2048, *device);
  PageLease first(pool, PageUse::kKv, 10);
  REQUIRE(first.try_grow(6));
  PageLease second(pool, PageUse::kAdapter, 10);
  CHECK_FALSE(second.try_grow(5));
  CHECK(second.size() == 0);
  CHECK(pool.num_free() == 4);
  REQUIRE(second.try_grow(4));
  CHECK(pool.num_free() == 0);
  CHECK(pool.num_used(PageUse::kKv) == 6);
  CHECK(pool.num_used(PageUse::kAdapter) == 4);
  std::vector<int> seen(10, 0);
  for (const PageLease* lease : {&first, &second}) {
    for (int32_t i = 0; i < lease->size(); ++i) {
      ++seen[static_cast<size_t>(lease->data()[i])];
    }
  }
  for (const int count : seen) {
    CHECK(count == 1);
  }
  pool.audit();
  first = PageLease();
  CHECK(pool.num_free() == 6);
  PageLease all(pool, PageUse::kKv, 6);
  CHECK(all.try_grow(6));  // any free page serves any use
}

TEST_CASE("a shared page stays until its last lease goes", "[page_pool]") {
  const auto device = open_device_cpu();
  PagePool pool(4, 2048, *device);
  PageLease owner(pool, PageUse::kKv, 4);
  REQUIRE(owner.try_grow(3));
  {
    PageLease fork(pool, PageUse::kKv, 4);
    fork.share_from(owner, 2);
    CHECK(pool.leases(owner.data()[0]) == 2);
    CHECK(pool.leases(owner.data()[2]) == 1);
    owner.resize_down(0);
    CHECK(pool.num_free() == 2);
    pool.audit();
  }
  CHECK(pool.num_free() == 4);
}

TEST_CASE("releasing a free page is a broken invariant, not a crash", "[page_pool]") {
  const auto device = open_device_cpu();
  PagePool pool(4, 2048, *device);
  PageId page = 0;
  REQUIRE(pool.try_reserve(PageUse::kKv, &page, 1));
  pool.release(&page, 1);
  CHECK_THROWS_AS(pool.release(&page, 1), Error);
}

TEST_CASE("moving a lease moves its pages", "[page_pool]") {
  const auto device = open_device_cpu();
  PagePool pool(4, 2048, *device);
  PageLease a(pool, PageUse::kKv, 2);
  REQUIRE(a.try_grow(2));
  PageLease b = std::move(a);
  CHECK(b.size() == 2);
  CHECK(a.size() == 0);
  CHECK(pool.num_free() == 2);
}

TEST_CASE("random churn agrees with a plain map", "[page_pool]") {
  std::mt19937 random(7);
  const auto device = open_device_cpu();
  PagePool pool(257, 1024, *device);
  std::vector<PageLease> leases;
  std::map<PageId, int> owners;
  for (int step = 0; step < 20000; ++step) {
    if (leases.empty() || random() % 2 == 0) {
      const auto count = static_cast<int32_t>(random() % 40);
      PageLease lease(pool, random() % 2 == 0 ? PageUse::kKv : PageUse::kAdapter, count);
      const bool fits = count <= 257 - static_cast<int32_t>(owners.size());
      REQUIRE(lease.try_grow(count) == fits);
      for (int32_t i = 0; i < lease.size(); ++i) {
        REQUIRE(owners.emplace(lease.data()[i], step).second);
      }
      leases.push_back(std::move(lease));
    } else {
      const size_t victim = random() % leases.size();
      const auto keep = static_cast<int32_t>(random() % static_cast<unsigned>(leases[victim].size() + 1));
      for (int32_t i = keep; i < leases[victim].size(); ++i) {
        owners.erase(leases[victim].data()[i]);
      }
      leases[victim].resize_down(keep);
      if (keep == 0) {
        leases.erase(leases.begin() + static_cast<std::ptrdiff_t>(victim));
      }
    }
    REQUIRE(pool.num_free() == 257 - static_cast<int32_t>(owners.size()));
    if (step % 500 == 0) {
      pool.audit();
    }
  }
}

}  // namespace moelora::test
