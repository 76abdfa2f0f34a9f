// SPDX-License-Identifier: Apache-2.0
// What a forward pass tells its ops of adapters: nothing that no adapter of the batch has. The ops do nothing here but
// note what they were told.
#include <algorithm>
#include <string>
#include <vector>

#include "runtime/model/model.h"
#include "tests/support/catch.h"
#include "tests/support/model_files.h"

using namespace moelora;
using namespace moelora::test;

namespace {

std::vector<LoraModule> told;
int experts_told = 0;
int sorted_by_slot = 0;

void note_modules(const LinearArgs& args) {
  for (int32_t i = 0; i < args.num_parts; ++i) {
    if (args.lora != nullptr && args.parts[i].module != LoraModule::kNone) {
      told.push_back(args.parts[i].module);
    }
  }
}

Kernels noting_kernels() {
  Kernels table = kernels_cpu();
  table.embedding = [](const EmbeddingArgs&, Stream&) {};
  table.rms_norm = [](const RmsNormArgs&, Stream&) {};
  table.swiglu = [](const SwigluArgs&, Stream&) {};
  table.rope_kv_write = [](const RopeKvWriteArgs&, Stream&) {};
  table.paged_attention = [](const PagedAttentionArgs&, Stream&) {};
  table.moe_combine = [](const MoeCombineArgs&, Stream&) {};
  table.linear = [](const LinearArgs& args, Stream&) { note_modules(args); };
  table.moe_router = [](const MoeRouterArgs& args, Stream&) {
    note_modules(args.router);
    sorted_by_slot += args.route.row_slot != nullptr ? 1 : 0;
  };
  table.moe_gate_up = [](const MoeGateUpArgs& args, Stream&) { experts_told += args.lora != nullptr ? 1 : 0; };
  table.moe_down = [](const MoeDownArgs& args, Stream&) { experts_told += args.lora != nullptr ? 1 : 0; };
  return table;
}

struct Pass {
  explicit Pass(const char* name) : config(load_model_config(case_model(name))) {}
  void run(const LoraBatch* lora) {
    told.clear();
    experts_told = sorted_by_slot = 0;
    const Kernels table = noting_kernels();
    const Model model(config, *weights, table, Compute::kExact);
    Workspace workspace(config, WorkspaceLimits{4, 4, 8}, *device);
    ForwardInput input;
    input.num_rows = input.num_sequences = input.num_logit_rows = 2;
    input.lora = lora;
    const auto stream = device->create_stream(1, 1 << 16);
    model.forward(input, workspace, *stream);
    std::sort(told.begin(), told.end());
    told.erase(std::unique(told.begin(), told.end()), told.end());
  }
  ModelConfig config;
  std::unique_ptr<Weights> weights = Weights::random(config, 3);
  std::unique_ptr<Device> device = open_device_cpu();
};

uint32_t bit(LoraModule module) {
  return 1u << static_cast<int>(module);
}
uint32_t bit(ExpertModule module) {
  return 1u << (kExpertModuleBit + static_cast<int>(module));
}

}  // namespace

TEST_CASE("model: ops are told of the modules that a batch's adapters have, and of no others") {
  Pass pass("qwen3_moe");
  const int32_t layers = pass.config.num_layers;
  const int32_t row_slot[2] = {0, 1};
  LoraBatch lora;
  lora.row_slot = row_slot;

  pass.run(nullptr);
  CHECK(told.empty());
  CHECK(experts_told == 0);
  CHECK(sorted_by_slot == 0);

  lora.modules = bit(LoraModule::kQ) | bit(LoraModule::kV);
  pass.run(&lora);
  CHECK(told == std::vector<LoraModule>{LoraModule::kQ, LoraModule::kV});
  CHECK(experts_told == 0);
  CHECK(sorted_by_slot == 0);

  for (const ExpertModule module : {ExpertModule::kGate, ExpertModule::kUp, ExpertModule::kDown}) {
    lora.modules = bit(LoraModule::kRouter) | bit(module);
    pass.run(&lora);
    CHECK(told == std::vector<LoraModule>{LoraModule::kRouter});
    CHECK(experts_told == 2 * layers);
    CHECK(sorted_by_slot == layers);
  }

  lora.modules = LoraBatch().modules;
  pass.run(&lora);
  CHECK(told ==
        std::vector<LoraModule>{LoraModule::kQ, LoraModule::kK, LoraModule::kV, LoraModule::kO, LoraModule::kRouter});
}

TEST_CASE("model: a dense model's ops are told of the modules of its MLP") {
  Pass pass("llama3");
  LoraBatch lora;
  lora.modules = bit(LoraModule::kO) | bit(LoraModule::kDown) | bit(LoraModule::kUp) | bit(ExpertModule::kUp);
  pass.run(&lora);
  CHECK(told == std::vector<LoraModule>{LoraModule::kO, LoraModule::kUp, LoraModule::kDown});
}
