// SPDX-License-Identifier: Apache-2.0
// What step_bench compares within one process: a step as one graph by each way that its ops have with adapters.
#pragma once

#include <functional>

#include "kernels/base/device.h"
#include "kernels/dense/linear_path.h"
#include "kernels/moe/expert_path.h"
#include "kernels/moe/router_path.h"

namespace moelora {

// By which ways a step's ops are computed.
struct StepPaths {
  LinearPath linear = LinearPath::kAuto;
  ExpertPath gate_up = ExpertPath::kAuto;
  ExpertPath down = ExpertPath::kAuto;
  RouterPath router = RouterPath::kAuto;
};

// Queues a step, by `paths` as they are then.
struct RecordedStep {
  StepPaths& paths;
  std::function<void()> queue;
  Device& device;
  Stream& stream;
};

// Prints the time of each way and the number of its kernels.
void compare_paths(const RecordedStep& step);

}  // namespace moelora
