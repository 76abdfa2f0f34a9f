// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/step_variants_cuda.h"

#include <cuda_runtime.h>
#include <cxxabi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/launch.cuh"

namespace moelora {
namespace {

constexpr int kRounds = 5;  // over all ways, so that a drift of the clock meets all of them
constexpr int kLaunches = 15;
constexpr int kSplits[] = {0, 8, 16, 32, 50, 64, 80, 100};  // percent of an SM's L1 that is shared memory
constexpr double kGain = 1.0;                               // us that a split must gain to be kept

// A recorded step whose kernels' splits can be set, before instantiate().
class StepGraph {
 public:
  struct Kernel {
    std::string name;
    std::vector<cudaGraphNode_t> nodes;
  };

  explicit StepGraph(const RecordedStep& step) : stream_(cuda_stream(step.stream)) {
    step.queue();  // all kernels are loaded then
    step.device.synchronize(step.stream);
    step.device.begin_recording(step.stream);
    step.queue();
    check_cuda(cudaStreamEndCapture(stream_, &graph_), "recording a step");
    for (cudaEvent_t& event : events_) {
      check_cuda(cudaEventCreate(&event), "cudaEventCreate");
    }
    find_kernels();
  }
  ~StepGraph() {
    if (exec_ != nullptr) {
      cudaGraphExecDestroy(exec_);
    }
    cudaGraphDestroy(graph_);
    for (const cudaEvent_t event : events_) {
      cudaEventDestroy(event);
    }
  }
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;

  [[nodiscard]] const std::vector<Kernel>& kernels() const { return kernels_; }
  [[nodiscard]] size_t launches() const { return launches_; }

  void set_split(size_t kernel, int percent) {
    cudaLaunchAttributeValue value{};
    value.sharedMemCarveout = static_cast<unsigned>(percent);
    for (const cudaGraphNode_t node : kernels_[kernel].nodes) {
      check_cuda(cudaGraphKernelNodeSetAttribute(node, cudaLaunchAttributePreferredSharedMemoryCarveout, &value),
                 "split of a recorded kernel");
    }
  }
  void instantiate() { check_cuda(cudaGraphInstantiate(&exec_, graph_, 0), "recording a step"); }
  // Median, us.
  double time() {
    std::vector<double> times;
    for (int i = 0; i < kLaunches; ++i) {
      check_cuda(cudaEventRecord(events_[0], stream_), "cudaEventRecord");
      check_cuda(cudaGraphLaunch(exec_, stream_), "launching a step");
      check_cuda(cudaEventRecord(events_[1], stream_), "cudaEventRecord");
      check_cuda(cudaStreamSynchronize(stream_), "a step");
      float ms = 0;
      cudaEventElapsedTime(&ms, events_[0], events_[1]);
      times.push_back(static_cast<double>(ms) * 1e3);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

 private:
  void find_kernels() {
    size_t count = 0;
    check_cuda(cudaGraphGetNodes(graph_, nullptr, &count), "nodes of a step");
    std::vector<cudaGraphNode_t> nodes(count);
    check_cuda(cudaGraphGetNodes(graph_, nodes.data(), &count), "nodes of a step");
    std::map<std::string, size_t> known;
    for (const cudaGraphNode_t node : nodes) {
      cudaGraphNodeType type{};
      check_cuda(cudaGraphNodeGetType(node, &type), "nodes of a step");
      if (type != cudaGraphNodeTypeKernel) {
        continue;
      }
      ++launches_;
      const std::string name = name_of(node);
      const auto [at, is_new] = known.emplace(name, kernels_.size());
      if (is_new) {
        kernels_.push_back({name, {}});
      }
      kernels_[at->second].nodes.push_back(node);
    }
  }
  // The function without its arguments, and the shape, which tells calls of one function apart.
  static std::string name_of(cudaGraphNode_t node) {
    cudaKernelNodeParams params{};
    check_cuda(cudaGraphKernelNodeGetParams(node, &params), "parameters of a recorded kernel");
    const char* mangled = nullptr;
    std::string name = "kernel";
    if (cudaFuncGetName(&mangled, params.func) == cudaSuccess && mangled != nullptr) {
      int status = 0;
      const std::unique_ptr<char, void (*)(void*)> plain(abi::__cxa_demangle(mangled, nullptr, nullptr, &status),
                                                         std::free);
      name = plain != nullptr ? plain.get() : mangled;
    } else {
      cudaGetLastError();
    }
    return short_name(name) + " <" + std::to_string(params.gridDim.x) + "x" + std::to_string(params.gridDim.y) + "x" +
           std::to_string(params.gridDim.z) + ", " + std::to_string(params.blockDim.x) + ", " +
           std::to_string(params.sharedMemBytes) + ">";
  }
  static std::string short_name(std::string name) {
    for (const char* const part : {"void ", "moelora::", "(anonymous namespace)::"}) {
      for (size_t at = name.find(part); at != std::string::npos; at = name.find(part)) {
        name.erase(at, std::string(part).size());
      }
    }
    // Arguments begin at the last parenthesis that is not within the template's; casts there are "(type)value".
    int depth = 0;
    for (size_t i = 0; i < name.size(); ++i) {
      depth += name[i] == '<' ? 1 : (name[i] == '>' ? -1 : 0);
      if (name[i] == '(' && depth == 0) {
        return name.substr(0, i);
      }
    }
    return name;
  }

  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
  cudaEvent_t events_[2] = {};
  std::vector<Kernel> kernels_;
  size_t launches_ = 0;
};

struct NamedPaths {
  const char* name;
  StepPaths paths;
};
constexpr ExpertPath kTail = ExpertPath::kFewRowsTail;
constexpr ExpertPath kBeside = ExpertPath::kFewRowsBeside;
constexpr NamedPaths kWays[] = {
    {"as it is", {}},
    {"experts: shrink and expand apart", {LinearPath::kAuto, ExpertPath::kFewTokensApart, ExpertPath::kFewTokensApart}},
    {"gate_up: expand in the tail", {LinearPath::kAuto, kTail, ExpertPath::kAuto}},
    {"down: expand in the tail", {LinearPath::kAuto, ExpertPath::kAuto, kTail}},
    {"experts: expand in the tail", {LinearPath::kAuto, kTail, kTail}},
    {"gate_up: shrink beside", {LinearPath::kAuto, kBeside, ExpertPath::kAuto}},
    {"down: shrink beside", {LinearPath::kAuto, ExpertPath::kAuto, kBeside}},
    {"experts: shrink beside", {LinearPath::kAuto, kBeside, kBeside}},
    {"experts: tokens gathered", {LinearPath::kAuto, ExpertPath::kManyTokensGather, ExpertPath::kManyTokensGather}},
    {"experts: tokens in bulk", {LinearPath::kAuto, ExpertPath::kManyTokensBulk, ExpertPath::kManyTokensBulk}},
    {"experts: tokens for pairs", {LinearPath::kAuto, ExpertPath::kManyTokensPairs, ExpertPath::kManyTokensPairs}},
    {"linear: shrink first", {LinearPath::kShrinkFirst, ExpertPath::kAuto, ExpertPath::kAuto}},
    {"linear: shrink beside", {LinearPath::kShrinkBeside, ExpertPath::kAuto, ExpertPath::kAuto}},
    {"linear first, experts beside", {LinearPath::kShrinkFirst, kBeside, kBeside}},
    {"linear beside, experts in the tail", {LinearPath::kShrinkBeside, kTail, kTail}},
    {"linear and experts beside", {LinearPath::kShrinkBeside, kBeside, kBeside}},
};

// us with a split for each kernel; -1: the one that its launch asks for.
double time_splits(const RecordedStep& step, const std::vector<int>& splits) {
  StepGraph graph(step);
  for (size_t i = 0; i < splits.size(); ++i) {
    if (splits[i] >= 0) {
      graph.set_split(i, splits[i]);
    }
  }
  graph.instantiate();
  const double once = graph.time();
  return std::min(once, graph.time());
}

}  // namespace

void compare_paths(const RecordedStep& step) {
  const StepPaths chosen = step.paths;
  std::vector<std::unique_ptr<StepGraph>> graphs;
  std::vector<std::vector<double>> times;
  for (const NamedPaths& way : kWays) {
    step.paths = way.paths;
    graphs.push_back(std::make_unique<StepGraph>(step));
    graphs.back()->instantiate();
    times.emplace_back();
  }
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < graphs.size(); ++i) {
      times[i].push_back(graphs[i]->time());
    }
  }
  size_t best = 0;
  std::printf("%-36s %8s %9s   (%s)\n", "way", "kernels", "us", "lowest to highest of the rounds' medians");
  for (size_t i = 0; i < graphs.size(); ++i) {
    std::sort(times[i].begin(), times[i].end());
    const double us = times[i][kRounds / 2];
    best = us < times[best][kRounds / 2] ? i : best;
    std::printf("%-36s %8zu %9.1f   (%.1f to %.1f)\n", kWays[i].name, graphs[i]->launches(), us, times[i].front(),
                times[i].back());
  }
  std::printf("fastest: %s\n", kWays[best].name);
  step.paths = best == 0 ? chosen : kWays[best].paths;
}

void sweep_splits(const RecordedStep& step) {
  const StepGraph graph(step);
  std::vector<int> chosen(graph.kernels().size(), -1);
  double best = time_splits(step, chosen);
  std::printf("splits as they are %.1f us; all kernels at", best);
  for (const int percent : {32, 64, 100}) {
    std::printf(" %d %%: %.1f", percent, time_splits(step, std::vector<int>(chosen.size(), percent)));
  }
  best = std::min(best, time_splits(step, chosen));
  std::printf("; as they are %.1f\n", best);
  for (int round = 0; round < 2; ++round) {
    for (size_t i = 0; i < chosen.size(); ++i) {
      const StepGraph::Kernel& kernel = graph.kernels()[i];
      std::printf("%zu x %s:", kernel.nodes.size(), kernel.name.c_str());
      std::vector<int> splits = chosen;
      for (const int percent : kSplits) {
        splits[i] = percent;
        const double us = time_splits(step, splits);
        std::printf(" %d=%.1f", percent, us);
        if (us < best - kGain) {
          best = us;
          chosen[i] = percent;
        }
      }
      std::printf(" -> %d\n", chosen[i]);
      std::fflush(stdout);
    }
  }
  std::printf("with the chosen splits %.1f us\n", time_splits(step, chosen));
}

}  // namespace moelora
