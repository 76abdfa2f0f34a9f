// SPDX-License-Identifier: Apache-2.0
// Host copies of images under a budget. A copy whose image has a folder may be dropped and is read again when it is
// wanted; one made from memory or at random stays as long as its image. Cost-aware least recently used (reload_cost.h)
// decides what leaves. Callers hold the engine's lock; `fetch` and `poll` are for the engine thread and take no memory.
//
// Any image that was added can be brought to host memory at some time: the budget holds all that cannot be dropped and
// the largest that can. A copy that is being uploaded, or read, counts and cannot leave, so that one added meanwhile
// may bring the sum over the budget until that has ended. The memory of copies that left is kept for the reads that
// have not begun, which have their bytes of the budget (LoadCache); that of one copy may stay longer and comes on top.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "runtime/adapter/adapter_reader.h"
#include "runtime/adapter/tiered_image.h"

namespace moelora {

// Which idle images may leave a tier. kUnwanted: those that the next requests of the queue will need stay.
enum class Evict : uint8_t { kUnwanted, kAny };

// An image that did not arrive.
struct FailedLoad {
  std::shared_ptr<TieredImage> image;
  Status status = Status::kOk;
  std::string message;
};

struct HostTierStats {
  uint64_t bytes = 0;          // of copies, and of those on their way from the disk
  int64_t images = 0;          // with a copy
  int64_t images_on_disk = 0;  // without
  uint64_t loads = 0;          // from disk, after registration
  uint64_t evictions = 0;
  double read_ms = 0, pack_ms = 0;  // of the loads
};

class HostTier {
 public:
  // `bytes_max` 0: no bound. `on_read` is called on another thread whenever there is something to poll.
  // `config`, of the model, may be null if no image has a folder. `bytes_per_second`: of reading; 0 = no bound.
  HostTier(uint64_t bytes_max, const ModelConfig* config, std::function<void()> on_read, int64_t bytes_per_second);

  // A new image, with its copy, which stays if there is room. Throws Error{kNomem} if the budget cannot hold it.
  void add(const std::shared_ptr<TieredImage>& image);
  // Nobody has the image any more. It must not be on its way anywhere.
  void remove(TieredImage& image);
  // The copy, or what is there of it while it is read. Null: it waits for the reader or for room; ask again.
  [[nodiscard]] std::shared_ptr<const AdapterImage> fetch(const std::shared_ptr<TieredImage>& image, Evict evict);
  // Between the two the copy that `fetch` gave is being uploaded. When all of a copy that was still being read has
  // been, its read is taken here; what failed is appended.
  void begin_upload(TieredImage& image);
  void end_upload(TieredImage& image, std::vector<FailedLoad>& failed);
  // Somebody's copy of an image, freed elsewhere if nobody else has it.
  void discard(std::shared_ptr<const AdapterImage> copy) {
    const std::shared_ptr<LoadCache> cache = copy->options.cache;
    reader_.discard(std::move(copy), cache, AdapterReader::Keep::kMemory);
  }
  void note_use(TieredImage& image);
  void cancel(const TieredImage& image) { reader_.cancel(image); }
  // Takes what was read; appends what failed.
  void poll(std::vector<FailedLoad>& failed);
  [[nodiscard]] bool is_reading() const { return !reader_.is_empty(); }
  [[nodiscard]] bool is_reader_working() { return reader_.is_working(); }
  void stop() { reader_.stop(); }

  [[nodiscard]] const HostTierStats& stats() const { return stats_; }
  [[nodiscard]] const std::vector<std::shared_ptr<TieredImage>>& images() const { return images_; }
  void audit() const;

 private:
  [[nodiscard]] bool has_room(uint64_t bytes) const { return bytes_max_ == 0 || stats_.bytes + bytes <= bytes_max_; }
  // Drops copies until `bytes` more fit: false if what may leave is too little.
  bool make_room(uint64_t bytes, Evict evict);
  [[nodiscard]] TieredImage* coldest(Evict evict) const;
  void note_copy(TieredImage& image);
  void drop(TieredImage& image, AdapterReader::Keep keep);
  [[nodiscard]] double value(const TieredImage& image) const;

  uint64_t bytes_max_;
  std::vector<std::shared_ptr<TieredImage>> images_;  // all, in any order
  std::vector<TieredImage*> copies_;                  // those with a copy that may be dropped
  uint64_t bytes_undroppable_ = 0;
  std::multiset<uint64_t> droppable_sizes_;
  double level_ = 0;
  uint64_t clock_ = 0;
  HostTierStats stats_;
  AdapterReader reader_;
};

}  // namespace moelora
