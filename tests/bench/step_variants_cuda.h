// SPDX-License-Identifier: Apache-2.0
// What step_bench compares within one process: a step as one graph by each way that its ops have for few rows, and with
// other splits of the L1 and shared memory for each of its kernels.
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

// Prints the time of each way and the number of its kernels, and leaves the fastest in `paths`.
void compare_paths(const RecordedStep& step);
// For each kernel in turn: prints the time at each split, keeps the best one. Two rounds.
void sweep_splits(const RecordedStep& step);

}  // namespace moelora
