// SPDX-License-Identifier: Apache-2.0
#include "runtime/adapter/adapter_packer.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>

#include "kernels/base/error.h"
#include "runtime/adapter/content_hash.h"
#include "runtime/adapter/read_plan.h"
#include "runtime/io/json.h"

namespace moelora {
namespace {

constexpr size_t kNameBytesMax = 512;  // of a tensor's name in a message

// One pass over the file. Workers take units in their order, so that what is done grows from the stream's start.
class Job {
 public:
  Job(const ByteSource& source, const ReadPlan& plan, HostBytes& stream, StreamProgress* progress)
      : source_(source),
        plan_(plan),
        stream_(stream.data()),
        stream_bytes_(stream.size()),
        progress_(progress),
        hashes_(plan_.units.size()),
        refused_(plan_.units.size(), nullptr),
        is_done_(plan_.units.size(), false) {}

  PackedAdapter run(const std::vector<BiasPlace>& biases, uint64_t seed, Stream& workers) {
    PackedAdapter result;
    pack_biases(biases, seed, result);
    HostBytes scratch(source_.is_memory() ? 0 : static_cast<size_t>(workers.num_threads()) * plan_.largest_unit);
    workers.parallel_for(plan_.units.size(), [&](size_t index, int worker) {
      std::byte* memory = scratch.empty() ? nullptr : scratch.data() + static_cast<size_t>(worker) * plan_.largest_unit;
      run_unit(index, seed, memory);
    });
    if (error_ != nullptr) {
      std::rethrow_exception(error_);
    }
    hashes_.push_back(result.hash);
    result.hash =
        hash_bytes(reinterpret_cast<const std::byte*>(hashes_.data()), hashes_.size() * sizeof(uint64_t), seed);
    for (const StoredTensor* tensor : refused_) {
      result.refused = result.refused == nullptr ? tensor : result.refused;
    }
    return result;
  }

 private:
  // First: they are few, and lie between the matrices.
  void pack_biases(const std::vector<BiasPlace>& biases, uint64_t seed, PackedAdapter& result) {
    HostBytes memory;
    result.hash = seed;
    for (const BiasPlace& bias : biases) {
      Dtype stored = Dtype::kF32;
      MOELORA_ASSERT(parse_dtype(bias.tensor->dtype, stored));
      memory.resize(bias.tensor->bytes);
      const std::byte* data = source_.read(bias.tensor->offset, bias.tensor->bytes, memory.data());
      result.hash = hash_bytes(data, bias.tensor->bytes, result.hash);
      std::byte* out = stream_ + static_cast<size_t>(bias.granule) * kGranuleBytes;
      if (!pack_bias(stored, static_cast<size_t>(bias.tensor->elements()), data, out) && result.refused == nullptr) {
        result.refused = bias.tensor;
      }
    }
  }

  void run_unit(size_t index, uint64_t seed, std::byte* memory) {
    if (failed_) {
      return;
    }
    try {
      const ReadUnit& unit = plan_.units[index];
      const std::byte* data = source_.read(unit.offset, unit.bytes(), memory);
      hashes_[index] = hash_bytes(data, unit.bytes(), seed);
      for (size_t part = unit.begin; part < unit.end; ++part) {
        const StoredTensor* refused = pack_part(plan_.parts[part], data, unit.offset);
        refused_[index] = refused_[index] == nullptr ? refused : refused_[index];
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      error_ = error_ == nullptr ? std::current_exception() : error_;
      failed_ = true;
      return;
    }
    note_done(index);
  }

  // `data` is what the file holds from `offset` on. Null, or a tensor with a value that is not finite.
  const StoredTensor* pack_part(const ReadPart& part, const std::byte* data, uint64_t offset) {
    const StoredTensor* refused = nullptr;
    for (int32_t block = part.first_block; block < part.end_block; ++block) {
      for (size_t i = part.begin; i < part.end; ++i) {
        const MatrixPlace& place = plan_.matrices[i];
        const TiledMatrix& matrix = place.matrix;
        if (block * kTileColumns < matrix.view.columns &&
            !pack_column_block(matrix, block, data + (block_offset(matrix, block) - offset),
                               stream_ + static_cast<size_t>(place.granule) * kGranuleBytes)) {
          refused = matrix.view.tensor;
        }
      }
    }
    return refused;
  }

  void note_done(size_t index) {
    if (progress_ == nullptr) {
      return;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    is_done_[index] = true;
    const size_t before = num_done_;
    while (num_done_ < is_done_.size() && is_done_[num_done_]) {
      ++num_done_;
    }
    if (num_done_ > before) {
      const uint64_t done = num_done_ == is_done_.size()
                                ? stream_bytes_
                                : static_cast<uint64_t>(plan_.units[num_done_].granule) * kGranuleBytes;
      progress_->publish(std::min(done, stream_bytes_ - 1));
    }
  }

  const ByteSource& source_;
  const ReadPlan& plan_;
  std::byte* stream_;
  uint64_t stream_bytes_;
  StreamProgress* progress_;
  std::vector<uint64_t> hashes_;
  std::vector<const StoredTensor*> refused_;
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  std::exception_ptr error_;   // under the lock
  std::vector<bool> is_done_;  // under the lock
  size_t num_done_ = 0;        // under the lock; units without one before them that is not done
};

}  // namespace

std::string quoted(const StoredTensor& tensor) {
  return "'" + printable(tensor.name, kNameBytesMax) + "'";
}

PackedAdapter pack_adapter(const StreamPlan& stream_plan, const ReadPlan& read_plan, const ByteSource& source,
                           HostBytes& stream, uint64_t seed, Stream& workers, StreamProgress* progress) {
  return Job(source, read_plan, stream, progress).run(stream_plan.biases, seed, workers);
}

HostBytes pack_random_adapter(const ModelConfig& config, std::vector<AdapterRecord>& records, uint64_t seed) {
  const StreamPlan plan = plan_stream(config, records, "random adapter");
  HostBytes stream = plan.make_stream({});
  TileRandom random(seed);
  for (const MatrixPlace& place : plan.matrices) {
    random.fill_matrix(place.matrix.rank, place.matrix.view.columns, place.matrix.is_a,
                       stream.data() + static_cast<size_t>(place.granule) * kGranuleBytes);
  }
  return stream;
}

}  // namespace moelora
