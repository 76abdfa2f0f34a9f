// SPDX-License-Identifier: Apache-2.0
// lora_resolve: fills the ResolvedLora of one slot from the adapter's stream in the pool, once when it was uploaded.
// GPUs only: the CPU reads records where they are.
#pragma once

#include "kernels/base/stream.h"
#include "kernels/lora/adapter_layout.h"

namespace moelora {

struct LoraResolveArgs {
  AdapterTable table;
  int32_t slot = 0;
  ResolvedLora* out = nullptr;  // the slot's part of table.resolved: [num_layers, modules_per_layer()]
};

void lora_resolve_cuda(const LoraResolveArgs& args, Stream& stream);

}  // namespace moelora
