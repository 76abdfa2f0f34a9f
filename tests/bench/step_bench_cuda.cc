// SPDX-License-Identifier: Apache-2.0
// Where the time of a step goes on a GPU: one forward pass over random weights of a real model's shape, every op
// between two events, the queue filled behind a delay so that launches do not show. Prints for each kind of op its
// calls, microseconds, bytes of weights, KV and adapters that it must read, and how much of the measured read ceiling
// that is; then the whole step as one graph and, for each kind, by how much it is shorter without it. Layers rotate
// over more memory than the L2 holds.
//
//   step_bench --model DIR [--layers N] [--rows C | --prompt P] [--context N] [--adapters N] [--rank R] [--runs N]
//              [--paths]
//
// --rows: decode, C sequences of one row at --context. --prompt: prefill, one sequence of P rows; its rows are --runs
// runs of equal length, each of the next adapter. Instead of the table: --paths compares the ways that ops have with
// adapters.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "kernels/kernels.h"
#include "runtime/adapter/adapter_cache.h"
#include "runtime/memory/kv_cache.h"
#include "runtime/model/model.h"
#include "tests/bench/delay_cuda.h"
#include "tests/bench/timed_ops_cuda.cuh"

namespace moelora {
namespace {

constexpr int kRepeats = 9;
constexpr int kGraphRepeats = 21;
constexpr int32_t kBlockTokens = 16;

struct Flags {
  std::string model;
  int32_t layers = 8, rows = 1, prompt = 0, context = 1900, adapters = 0, rank = 32, runs = 1;
  bool paths = false;
};

class StepBench {
 public:
  explicit StepBench(const Flags& flags) : flags_(flags), config_(load_model_config(flags.model)) {
    config_.num_layers = std::min(flags.layers, config_.num_layers);
    config_.layer_is_moe.resize(static_cast<size_t>(config_.num_layers));
    device_ = open_device_cuda(0);
    stream_ = device_->create_stream(1, 0);
    table_ = timed_kernels();
    weights_ = Weights::shapes(config_);
    weights_->move_to(*device_, *stream_, kernels_cuda(), config_, true, 1);
    sequences_ = flags.prompt > 0 ? 1 : flags.rows;
    rows_ = flags.prompt > 0 ? flags.prompt : flags.rows;
    context_ = flags.prompt > 0 ? flags.prompt : flags.context;
    workspace_ = std::make_unique<Workspace>(
        config_, WorkspaceLimits{std::max(rows_, 64), std::max(sequences_, 64), kRankMax}, *device_);
    make_kv();
    make_adapters();
    make_arrays();
    model_ = std::make_unique<Model>(config_, *weights_, table_, Compute::kBf16);
  }

  void run() {
    ceiling_ = measure_ceiling();
    std::printf("%s, %d layers, %d rows, context %d, %d adapters of rank %d on %s; read ceiling %.2f TB/s\n",
                flags_.model.c_str(), config_.num_layers, rows_, context_, flags_.adapters, flags_.rank,
                device_->info().name.c_str(), ceiling_ / 1e12);
    if (flags_.paths) {
      return compare();
    }
    std::map<std::string, std::vector<double>> times;
    std::map<std::string, int> calls;
    for (int repeat = 0; repeat < kRepeats + 2; ++repeat) {
      recorder_.begin();
      recorder = &recorder_;
      delay_cuda(6.0, *stream_);
      model_->forward(input_, *workspace_, *stream_);
      device_->synchronize(*stream_);
      if (repeat < 2) {
        continue;
      }
      std::map<std::string, double> sums;
      calls.clear();
      for (size_t i = 0; i < recorder_.names.size(); ++i) {
        float ms = 0;
        cudaEventElapsedTime(&ms, recorder_.events[2 * i], recorder_.events[2 * i + 1]);
        sums[recorder_.names[i]] += static_cast<double>(ms) * 1e3;
        ++calls[recorder_.names[i]];
      }
      for (const auto& [name, us] : sums) {
        times[name].push_back(us);
      }
    }
    print(times, calls);
  }

 private:
  static constexpr int32_t kRankMax = 256;  // as in an engine with default options

  void make_kv() {
    geometry_ =
        choose_kv_geometry(config_.num_layers, config_.num_kv_heads, config_.head_dim, kBlockTokens, Dtype::kBf16);
    const int32_t blocks = geometry_.blocks(context_ + 1);
    int64_t pages = int64_t{sequences_} * blocks * geometry_.layout.num_groups;
    for (int32_t i = 0; i < flags_.adapters; ++i) {
      images_.push_back(random_adapter(config_, flags_.rank, true, true, static_cast<uint64_t>(i) + 1));
      pages += static_cast<int64_t>(images_.back()->stream.size()) / geometry_.page_bytes + 1;
    }
    pool_ = std::make_unique<PagePool>(static_cast<int32_t>(pages), geometry_.page_bytes, *device_);
    FillRandomArgs fill;
    fill.data = pool_->base();
    fill.count = pages * geometry_.page_bytes / 2;
    fill.scale = 1.0f;
    kernels_cuda().fill_random(fill, *stream_);
    max_blocks_ = blocks;
    std::vector<int32_t> tables(static_cast<size_t>(sequences_) * static_cast<size_t>(blocks) *
                                static_cast<size_t>(geometry_.layout.num_groups));
    if (!pool_->try_reserve(PageUse::kKv, tables.data(), static_cast<int32_t>(tables.size()))) {
      throw Error(Status::kInternal, "the pool is too small");
    }
    input_.kv = {geometry_.layout, pool_->base(), geometry_.page_bytes, upload(tables), max_blocks_};
  }

  void make_adapters() {
    if (flags_.adapters == 0) {
      return;
    }
    const AdapterCacheLimits limits{flags_.adapters, config_.num_layers, config_.num_experts};
    cache_ = std::make_unique<AdapterCache>(limits, *pool_, kernels_cuda(), *device_, nullptr);
    for (const auto& image : images_) {
      auto adapter = std::make_shared<Adapter>();
      adapter->image = std::make_shared<TieredImage>(image);
      cache_->add(adapter);
      std::vector<FailedLoad> failed;
      while (failed.empty() && cache_->place(*adapter, 0) == Residency::kLoading) {
        cache_->poll(failed);
      }
      MOELORA_ASSERT(failed.empty() && cache_->acquire(*adapter) > 0);
      adapters_.push_back(adapter);
    }
    cache_->publish(*stream_);
    device_->synchronize(*stream_);
  }

  void make_arrays() {
    std::vector<int32_t> tokens, positions, sequence_of, begin{0}, logits;
    for (int32_t t = 0; t < rows_; ++t) {
      tokens.push_back((t * 7919 + 17) % config_.vocab_size);
      positions.push_back(flags_.prompt > 0 ? t : context_);
      sequence_of.push_back(flags_.prompt > 0 ? 0 : t);
    }
    for (int32_t s = 0; s < sequences_; ++s) {
      begin.push_back(flags_.prompt > 0 ? rows_ : s + 1);
      logits.push_back(begin.back() - 1);
    }
    input_.num_rows = rows_;
    input_.num_sequences = sequences_;
    input_.num_logit_rows = sequences_;
    input_.token_ids = upload(tokens);
    input_.positions = upload(positions);
    input_.row_sequence = upload(sequence_of);
    input_.row_begin = upload(begin);
    input_.logit_rows = upload(logits);
    if (flags_.adapters == 0) {
      return;
    }
    std::vector<int32_t> slots, sorted, segments, segment_slots;
    for (int32_t t = 0; t < rows_; ++t) {
      const int64_t turn = flags_.prompt > 0 ? int64_t{t} * flags_.runs / rows_ : t;
      slots.push_back(static_cast<int32_t>(turn % flags_.adapters) + 1);
    }
    for (int32_t slot = 1; slot <= flags_.adapters; ++slot) {
      const size_t first = sorted.size();
      for (int32_t t = 0; t < rows_; ++t) {
        if (slots[static_cast<size_t>(t)] == slot) {
          sorted.push_back(t);
        }
      }
      if (sorted.size() > first) {
        segments.push_back(static_cast<int32_t>(first));
        segment_slots.push_back(slot);
      }
    }
    lora_.num_rows = rows_;
    lora_.num_segments = static_cast<int32_t>(segments.size());
    lora_.max_rank = flags_.rank;
    lora_.rank_stride = kRankMax;
    lora_.modules = 0;
    for (const std::shared_ptr<const AdapterImage>& image : images_) {
      lora_.modules |= image->modules;
    }
    lora_.counts = upload(std::vector<int32_t>{rows_, lora_.num_segments, (flags_.rank + 7) / 8 * 8});
    segments.push_back(rows_);
    lora_.table = cache_->table();
    lora_.row_slot = upload(slots);
    lora_.row_scale = upload(std::vector<float>(static_cast<size_t>(rows_), 1.0f));
    lora_.sorted_rows = upload(sorted);
    lora_.segment_begin = upload(segments);
    lora_.segment_slot = upload(segment_slots);
    input_.lora = &lora_;
  }

  template <class T>
  const T* upload(const std::vector<T>& values) {
    arrays_.emplace_back(*device_, values.size() * sizeof(T) + 256, "array");
    device_->copy_to_device(arrays_.back().data(), values.data(), values.size() * sizeof(T), *stream_);
    device_->synchronize(*stream_);
    return reinterpret_cast<const T*>(arrays_.back().data());
  }

  double measure_ceiling() {
    const Weights::Area area = weights_->areas().front();
    const size_t bytes = std::min(area.bytes, size_t{4} << 30);
    std::vector<double> rates;
    cudaEvent_t begin = recorder_.events[0];
    cudaEvent_t end = recorder_.events[1];
    for (int i = 0; i < kRepeats; ++i) {
      record_event(begin, *stream_);
      kernels_cuda().read_memory({area.data, bytes, nullptr}, *stream_);
      record_event(end, *stream_);
      device_->synchronize(*stream_);
      float ms = 0;
      cudaEventElapsedTime(&ms, begin, end);
      rates.push_back(static_cast<double>(bytes) / (static_cast<double>(ms) * 1e-3));
    }
    std::sort(rates.begin(), rates.end());
    return rates[rates.size() / 2];
  }

  void compare() {
    recorder = &recorder_;
    recorder_.recording_graph = true;
    const auto queue = [this] { model_->forward(input_, *workspace_, *stream_); };
    const RecordedStep step{recorder_.paths, queue, *device_, *stream_};
    compare_paths(step);
  }

  // Weight and KV bytes that all calls of an op must read in a step.
  [[nodiscard]] double bytes_of(const std::string& name, double active) const {
    double bytes = 0;
    const auto add = [&](const Weight& weight) {
      bytes += static_cast<double>(weight.rows) * weight.cols * static_cast<double>(dtype_bytes(weight.dtype));
    };
    const auto experts = [&](const ExpertWeights& weights) {
      const double element = weights.format == ExpertFormat::kRows ? 2.0 : 17.0 / 32.0;
      bytes += active * weights.rows * weights.cols * element;
    };
    for (const LayerWeights& layer : weights_->layers) {
      if (name == "linear q, k, v") {
        add(layer.q), add(layer.k), add(layer.v);
      } else if (name == "linear o") {
        add(layer.o);
      } else if (name == kRouting) {
        add(layer.router);
      } else if (name == "moe_gate_up") {
        experts(layer.expert_gate), experts(layer.expert_up);
      } else if (name == "moe_down") {
        experts(layer.expert_down);
      } else if (name == "paged_attention") {
        bytes += flags_.prompt > 0 ? 0.0 : 4.0 * sequences_ * context_ * config_.num_kv_heads * config_.head_dim;
      }
    }
    if (name == "linear lm_head") {
      add(weights_->lm_head);
    }
    return bytes;
  }

  void print(std::map<std::string, std::vector<double>>& times, std::map<std::string, int>& calls) {
    uint32_t totals[2] = {};
    device_->copy_to_host(totals, workspace_->order.totals, sizeof totals, *stream_);
    const double active = config_.num_experts == 0
                              ? 0
                              : static_cast<double>(totals[0]) / (kRepeats + 2) / std::max(1, config_.num_layers);
    std::printf("active experts a layer %.1f, adapter segments a layer %.1f\n", active,
                static_cast<double>(totals[1]) / (kRepeats + 2) / std::max(1, config_.num_layers));
    std::printf("%-20s %6s %10s %10s %10s %8s %7s\n", "op", "calls", "us", "us/call", "MB/call", "GB/s", "ceiling");
    double total = 0;
    for (auto& [name, values] : times) {
      std::sort(values.begin(), values.end());
      const double us = values[values.size() / 2];
      total += us;
      const double bytes = bytes_of(name, active);
      std::printf("%-20s %6d %10.1f %10.2f %10.2f %8.0f %6.0f%%\n", name.c_str(), calls[name], us, us / calls[name],
                  bytes / calls[name] / 1e6, bytes / us / 1e3, 100.0 * bytes / us * 1e6 / ceiling_);
    }
    std::printf("sum of ops %.1f us\n", total);
    if (rows_ > 64) {
      return;
    }
    // Without an op the rest computes other values: the routing stays what it was, or there would be other work.
    double whole = print_graph();
    const double routing = whole - (recorder_.left_out = {kRouting}, time_graph()[kGraphRepeats / 2]);
    whole -= routing;
    for (const auto& [name, count] : calls) {
      recorder_.left_out = {kRouting, name};
      const double us = name == kRouting ? routing : whole - time_graph()[kGraphRepeats / 2];
      std::printf("  of which %-20s %6d %10.1f %10.2f\n", name.c_str(), count, us, us / count);
    }
  }

  // The same step as one graph: what the events and launches of the table above add is not in it. An op that is left
  // out leaves what it wrote before, so that the others have the same work.
  std::vector<double> time_graph() {
    recorder_.recording_graph = true;
    device_->begin_recording(*stream_);
    model_->forward(input_, *workspace_, *stream_);
    const std::unique_ptr<Graph> graph = device_->end_recording(*stream_);
    recorder_.recording_graph = false;
    std::vector<double> times;
    for (int i = 0; i < kGraphRepeats; ++i) {
      record_event(recorder_.events[0], *stream_);
      device_->launch(*graph, *stream_);
      record_event(recorder_.events[1], *stream_);
      device_->synchronize(*stream_);
      float ms = 0;
      cudaEventElapsedTime(&ms, recorder_.events[0], recorder_.events[1]);
      times.push_back(static_cast<double>(ms) * 1e3);
    }
    std::sort(times.begin(), times.end());
    return times;
  }
  double print_graph() {
    const std::vector<double> times = time_graph();
    std::printf("as one graph %.1f us (%.1f to %.1f)\n", times[times.size() / 2], times.front(), times.back());
    return times[times.size() / 2];
  }

  Flags flags_;
  ModelConfig config_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  Kernels table_{};
  std::unique_ptr<Weights> weights_;
  std::unique_ptr<Workspace> workspace_;
  std::vector<std::shared_ptr<const AdapterImage>> images_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<AdapterCache> cache_;
  std::vector<std::shared_ptr<Adapter>> adapters_;
  std::vector<DeviceMemory> arrays_;
  std::unique_ptr<Model> model_;
  KvGeometry geometry_;
  ForwardInput input_;
  LoraBatch lora_;
  Recorder recorder_;
  int32_t sequences_ = 0, rows_ = 0, context_ = 0, max_blocks_ = 0;
  double ceiling_ = 0;
};

}  // namespace
}  // namespace moelora

int main(int argc, char** argv) {
  moelora::Flags flags;
  CLI::App app("Where the time of a step goes on a GPU");
  app.add_option("--model", flags.model, "folder with config.json")->required();
  app.add_option("--layers", flags.layers);
  app.add_option("--rows", flags.rows);
  app.add_option("--prompt", flags.prompt);
  app.add_option("--context", flags.context);
  app.add_option("--adapters", flags.adapters);
  app.add_option("--rank", flags.rank);
  app.add_option("--runs", flags.runs)->check(CLI::PositiveNumber);
  app.add_flag("--paths", flags.paths);
  CLI11_PARSE(app, argc, argv);
  try {
    moelora::StepBench(flags).run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return 0;
}
