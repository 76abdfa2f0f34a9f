// SPDX-License-Identifier: Apache-2.0
// How long an adapter takes from its folder (in the system's page cache) to device pages when its host copy was
// dropped, by stages, beside the parts alone: reading the file with as many threads and doing nothing with it, and an
// upload from a host copy. The slower of the two is the ceiling of the whole.
//
//   load_bench MODEL_DIR ADAPTER_DIR [cpu|cuda [ROUNDS [THREADS]]]
//
// MODEL_DIR needs no more than config.json. Exits 1 if a load failed.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "kernels/kernels.h"
#include "runtime/adapter/adapter_cache.h"
#include "runtime/adapter/load_cache.h"
#include "runtime/io/byte_source.h"
#include "runtime/memory/host_resources.h"

using namespace moelora;

namespace {

constexpr int64_t kPageBytes = int64_t{64} << 10;
constexpr size_t kReadBytes = size_t{512} << 10;

double now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void print(const char* what, const std::vector<double>& ms, uint64_t bytes) {
  const double middle = median(ms);
  std::printf("%-44s %8.1f ms (%.1f to %.1f), %6.2f GB/s\n", what, middle, *std::min_element(ms.begin(), ms.end()),
              *std::max_element(ms.begin(), ms.end()), static_cast<double>(bytes) / middle * 1e-6);
}

double read_alone(const std::string& path, int threads) {
  const double begun = now();
  const ByteSource source(path);
  Stream workers(threads, kReadBytes);
  workers.parallel_for(source.bytes() / kReadBytes, [&](size_t i, int worker) {
    (void)source.read(i * kReadBytes, kReadBytes, workers.scratch(worker));
  });
  return now() - begun;
}

class LoadBench {
 public:
  LoadBench(const char* model_dir, bool cuda, int threads) : config_(load_model_config(model_dir)) {
#ifdef MOELORA_HAVE_CUDA
    device_ = cuda ? open_device_cuda(0) : open_device_cpu();
    kernels_ = cuda ? &kernels_cuda() : &kernels_cpu();
#else
    device_ = cuda ? throw Error(Status::kUnsupported, "this build has no CUDA") : open_device_cpu();
    kernels_ = &kernels_cpu();
#endif
    options_.compute = Compute::kBf16;
    options_.num_threads = threads;
    options_.cache = std::make_shared<LoadCache>();
  }

  // Two adapters of one folder, of which the host can hold one.
  void open(const char* adapter_dir) {
    std::vector<double> first_ms;
    for (const char* name : {"one", "other"}) {
      const double begun = now();
      auto adapter = std::make_shared<Adapter>();
      adapter->name = name;
      adapter->image = std::make_shared<TieredImage>(load_adapter_dir(adapter_dir, config_, options_));
      first_ms.push_back(now() - begun);
      if (cache_ == nullptr) {
        bytes_ = adapter->image->stream_bytes;
        make_cache();
      }
      cache_->add(adapter);
      adapters_.push_back(adapter);
    }
    std::printf("%llu bytes in %d tensors; first load to host memory %.1f ms, the next of such a file %.1f ms\n",
                static_cast<unsigned long long>(bytes_), adapters_[0]->image->num_tensors, first_ms[0], first_ms[1]);
  }

  double load(size_t index) {
    const double begun = now();
    while (cache_->place(*adapters_[index], 0) != Residency::kResident) {
      std::vector<FailedLoad> failed;
      cache_->poll(failed);
      if (!failed.empty()) {
        throw Error(failed[0].status, failed[0].message);
      }
      if (!cache_->is_loading() && !cache_->is_placed(*adapters_[index]) && !cache_->evict_idle()) {
        continue;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return now() - begun;
  }

  void run(const std::string& weights, int rounds, int threads) {
    std::vector<double> cold, open_ms, pack_ms, upload_ms, warm, read;
    for (int i = 0; i < rounds; ++i) {
      read.push_back(read_alone(weights, threads));
      for (size_t index = 0; index < 2; ++index) {
        if (adapters_[index]->image->host != nullptr) {
          continue;
        }
        const HostTierStats before = cache_->host();
        cold.push_back(load(index));
        const HostTierStats after = cache_->host();
        open_ms.push_back(after.read_ms - before.read_ms);
        pack_ms.push_back(after.pack_ms - before.pack_ms);
        upload_ms.push_back(adapters_[index]->upload_ms.load());
        while (cache_->evict_idle()) {
        }
        warm.push_back(load(index));
        while (cache_->evict_idle()) {
        }
      }
    }
    print("from the page cache to the device", cold, bytes_);
    print("  opening, header, plan", open_ms, bytes_);
    print("  reading and packing", pack_ms, bytes_);
    print("  upload, most of it beside that", upload_ms, bytes_);
    print("reading the file alone", read, bytes_);
    print("upload alone, from host memory", warm, bytes_);
    std::printf("of the slower part: %.2f\n", std::max(median(read), median(warm)) / median(cold));
  }

 private:
  void make_cache() {
    const auto pages = static_cast<int32_t>(static_cast<int64_t>(bytes_) / kPageBytes + 2);
    pool_ = std::make_unique<PagePool>(pages, kPageBytes, *device_);
    AdapterCacheLimits limits{2, config_.num_layers, config_.num_experts};
    limits.host_bytes_max = bytes_;
    limits.config = &config_;
    cache_ = std::make_unique<AdapterCache>(limits, *pool_, *kernels_, *device_, nullptr);
  }

  ModelConfig config_;
  std::unique_ptr<Device> device_;
  const Kernels* kernels_ = nullptr;
  AdapterLoadOptions options_;
  uint64_t bytes_ = 0;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<AdapterCache> cache_;
  std::vector<std::shared_ptr<Adapter>> adapters_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: load_bench MODEL_DIR ADAPTER_DIR [cpu|cuda [ROUNDS [THREADS]]]\n");
    return 2;
  }
  const bool cuda = argc > 3 && std::strcmp(argv[3], "cuda") == 0;
  const int rounds = argc > 4 ? std::atoi(argv[4]) : 5;
  const int threads = argc > 5 ? std::atoi(argv[5]) : std::max(1, host_resources().num_cores * 3 / 4);
  try {
    LoadBench bench(argv[1], cuda, threads);
    bench.open(argv[2]);
    std::printf("%s, %d threads read and pack\n", cuda ? "cuda" : "cpu", threads);
    bench.run(std::string(argv[2]) + "/adapter_model.safetensors", rounds, threads);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
