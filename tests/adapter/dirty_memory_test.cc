// SPDX-License-Identifier: Apache-2.0
// No byte of a stream is what the memory held before. In this whole program the library's host memory is filled when it
// is handed out, so that other tests see such a byte too.
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "runtime/memory/host_memory.h"
#include "tests/adapter/adapter_files.h"
#include "tests/support/catch.h"

namespace moelora::test {
namespace {

std::atomic<int> filling{0xff};

const bool is_set = set_host_allocator({[](void*, size_t size, size_t alignment) -> void* {
                                          void* memory = nullptr;
                                          if (posix_memalign(&memory, std::max(alignment, sizeof(void*)), size) != 0) {
                                            return nullptr;
                                          }
                                          return std::memset(memory, filling, size);
                                        },
                                        [](void*, void* memory, size_t, size_t) { std::free(memory); }, nullptr});

}  // namespace

TEST_CASE("streams of full and of partial tiles do not depend on what memory held") {
  REQUIRE(is_set);
  const ModelConfig model = tiny_moe(Family::kQwen3Moe, 128, 64);
  for (const int32_t rank : {3, 8, 16, 21}) {
    for (const char* dtype : {"BF16", "F32"}) {
      for (const bool with_bias : {false, true}) {
        INFO("rank " << rank << " " << dtype << " bias " << with_bias);
        Draw draw(1);
        SafetensorsWriter writer;
        const std::string layer = std::string(kLayerPrefix) + "1.";
        add_pair(writer, layer + "self_attn.k_proj", rank, 128, 16, draw, dtype);
        add_pair(writer, layer + "mlp.experts.2.up_proj", rank, 128, 64, draw, dtype);
        add_pair(writer, layer + "mlp.experts.3.down_proj", rank, 64, 128, draw, dtype);
        Json config = lora_config(rank, 6);
        if (with_bias) {
          config["lora_bias"] = true;
          writer.add(layer + "self_attn.k_proj.lora_B.bias", {16}, draw.floats(16));
          writer.add(layer + "mlp.experts.2.up_proj.lora_B.bias", {64}, draw.floats(64));
          writer.add(layer + "mlp.experts.3.down_proj.lora_B.bias", {128}, draw.floats(128));
        }
        filling = 0x55;
        const auto first = load(config, writer, model);
        filling = 0xff;
        AdapterLoadOptions options;
        options.num_threads = 3;
        const auto second = load(config, writer, model, options);
        CHECK(first->stream == second->stream);
        CHECK(first->fingerprint == second->fingerprint);
      }
    }
    filling = 0x55;
    const auto first = random_adapter(model, rank, true, true, 1);
    filling = 0xff;
    CHECK(first->stream == random_adapter(model, rank, true, true, 1)->stream);
  }
}

}  // namespace moelora::test
