// SPDX-License-Identifier: Apache-2.0
// open_memory DIR [cpu|cuda]: opens a checkpoint, makes one token, and holds the peak of host and device bytes while
// opening against the packed size of its tensors + 10 %. Exits 0 or 1, and with 77 without a device.
//
// On the CPU the weights stay in the mapped file: its size counts, and beside it all that the process took itself. On a
// GPU the file is the system's cache, which it may drop, and gone after opening: what counts is what the GPU has less
// of, CUDA's own context aside, and what the process took itself. Page pool and work space are sizes that the host
// chooses; they are made small here, and are counted.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "runtime/engine/engine.h"

using namespace moelora;

namespace {

uint64_t status_bytes(const char* key) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, std::strlen(key), key) == 0) {
      return std::stoull(line.substr(std::strlen(key) + 1)) * 1024;
    }
  }
  return 0;
}

// Not of a file: heap, anonymous mappings, page-locked memory.
uint64_t own_bytes() {
  return status_bytes("RssAnon") + status_bytes("RssShmem");
}

uint64_t device_free(bool cuda) {
#ifdef MOELORA_HAVE_CUDA
  if (cuda) {
    return list_devices_cuda().at(0).memory_free_bytes;
  }
#endif
  (void)cuda;
  return 0;
}

uint64_t safetensors_bytes(const char* dir) {
  uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(dir)) {
    bytes += entry.path().extension() == ".safetensors" ? std::filesystem::file_size(entry.path()) : 0;
  }
  return bytes;
}

bool makes_a_token(Engine& engine) {
  auto submission = std::make_shared<Submission>();
  submission->request.prompt = {1, 2, 3};
  submission->request.sampling.max_tokens = 1;
  submission->stream =
      std::make_unique<TokenStream>(submission->request, engine.info().config.vocab_size, nullptr, 1, 0);
  engine.submit(submission);
  int32_t token = -1;
  size_t count = 0;
  return submission->stream->read(300000, &token, 1, &count) == Status::kOk && token >= 0;
}

int run(const char* dir, bool cuda) {
  EngineOptions options;
  options.device = cuda ? "cuda" : "cpu";
  options.max_context_tokens = 1024;
  options.max_num_sequences = 4;
  options.max_batch_tokens = 64;
  options.max_adapters_resident = 1;
  options.max_lora_rank = 16;
  options.device_memory_bytes = 64 << 20;
#ifdef MOELORA_HAVE_CUDA
  if (cuda && list_devices_cuda().empty()) {
    std::printf("skipped: no CUDA device\n");
    return 77;
  }
#else
  if (cuda) {
    std::printf("skipped: built without CUDA\n");
    return 77;
  }
#endif
  const uint64_t own_before = own_bytes();
  const uint64_t free_before = device_free(cuda);
  std::atomic<bool> open{false};
  uint64_t own_peak = own_before;
  uint64_t device_peak = 0;
  std::thread watch([&] {
    do {
      own_peak = std::max(own_peak, own_bytes());
      device_peak = std::max(device_peak, free_before - std::min(free_before, device_free(cuda)));
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    } while (!open);
  });
  std::shared_ptr<Engine> engine;
  const auto start = std::chrono::steady_clock::now();
  try {
    engine = Engine::create(options, dir);
  } catch (...) {
    open = true;
    watch.join();
    throw;
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  open = true;
  watch.join();
  own_peak = std::max(own_peak, own_bytes()) - own_before;
  device_peak = std::max(device_peak, free_before - std::min(free_before, device_free(cuda)));
  const uint64_t packed = engine->info().weight_bytes;
  const uint64_t mapped = cuda ? 0 : safetensors_bytes(dir);
  const double ratio = static_cast<double>(own_peak + device_peak + mapped) / static_cast<double>(packed);
  std::printf(
      "packed %.1f MB; mapped file %.1f MB, own host memory %.1f MB, device %.1f MB at the peak: %.4f of packed "
      "(pool %.1f MB, work space %.1f MB of it); opened in %.2f s\n",
      static_cast<double>(packed) / 1e6, static_cast<double>(mapped) / 1e6, static_cast<double>(own_peak) / 1e6,
      static_cast<double>(device_peak) / 1e6, ratio, static_cast<double>(engine->info().pool_bytes) / 1e6,
      static_cast<double>(engine->info().workspace_bytes) / 1e6, seconds);
  if (!makes_a_token(*engine)) {
    std::printf("no token came\n");
    return 1;
  }
  return ratio <= 1.10 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::printf("usage: open_memory DIR [cpu|cuda]\n");
    return 2;
  }
  try {
    return run(argv[1], argc > 2 && std::strcmp(argv[2], "cuda") == 0);
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
}
