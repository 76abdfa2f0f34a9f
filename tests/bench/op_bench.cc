// SPDX-License-Identifier: Apache-2.0
// op_bench: times the ops of a layer in OLMoE-1B-7B's shape against ceilings measured beside them. For every op:
// bytes of weights, FLOPs, median time, GB/s and GFLOP/s, and the share of the read and of the multiply-add
// ceiling (median of ratios taken in pairs, because shared machines change speed from second to second).
//   op_bench [--rows N]... [--lora] [--bf16] [--mxfp4] [--threads N] [--layers N] [--rounds N]
// --mxfp4: gpt-oss-20b's layer shape, experts in MXFP4.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "tests/bench/bench_model.h"
#include "tests/bench/ceilings.h"

namespace moelora {
namespace {

struct Options {
  std::vector<int32_t> rows;
  bool lora = false;
  bool mxfp4 = false;
  Compute compute = Compute::kExact;
  int threads = 2;
  int layers = 2;
  int rounds = 15;
};

struct OpTimes {
  std::string name;
  double bytes = 0;
  double flops = 0;
  std::vector<double> seconds, read_share, fma_share;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

class Bench {
 public:
  Bench(const BenchModel& model, int32_t rows, const Options& options, Stream& stream)
      : model_(model), step_(model, rows, options.lora, 7), options_(options), stream_(stream) {}

  void run() {
    for (int round = 0; round < options_.rounds; ++round) {
      const BenchStep fresh(model_, step_.rows, options_.lora, static_cast<uint32_t>(round));
      std::copy(fresh.ids.begin(), fresh.ids.end(), step_.ids.begin());
      at_ = 0;
      round_seconds_ = round_bytes_ = round_flops_ = 0;
      run_layer(model_.layers[static_cast<size_t>(round % model_.shape.layers)]);
      if (step_.rows <= 64) {
        run_head();
      }
      record("sum", round_seconds_, round_bytes_, round_flops_);
    }
    print();
  }

 private:
  template <class Op>
  void timed(const char* name, double bytes, double flops, const Op& op) {
    const double begin = seconds_now();
    op();
    const double seconds = seconds_now() - begin;
    round_seconds_ += seconds;
    round_bytes_ += bytes;
    round_flops_ += flops;
    record(name, seconds, bytes, flops);
  }

  // Each figure is paired with ceilings measured right after it.
  void record(const char* name, double seconds, double bytes, double flops) {
    if (at_ == ops_.size()) {
      ops_.push_back({name, 0, 0, {}, {}, {}});
    }
    OpTimes& op = ops_[at_++];
    op.bytes = bytes;
    op.flops = flops;
    op.seconds.push_back(seconds);
    constexpr size_t kSpan = size_t{192} << 20;
    cold_ = (cold_ + kSpan) % (model_.weight_bytes - kSpan);
    read_.push_back(read_ceiling(model_.weights.get() + cold_ / 4096 * 4096, kSpan, stream_));
    fma_.push_back(fma_ceiling(stream_));
    op.read_share.push_back(bytes / seconds * 1e-9 / read_.back());
    op.fma_share.push_back(flops / seconds * 1e-9 / fma_.back());
  }

  void linear(const char* name, std::initializer_list<std::pair<const Weight*, Rows>> parts, LoraModule first,
              int32_t rows, Rows x) {
    LinearArgs args;
    args.x = x;
    args.num_rows = rows;
    args.k = model_.shape.hidden;
    for (const auto& [weight, out] : parts) {
      LinearPart& part = args.parts[args.num_parts];
      part.weight = *weight;
      part.out = out;
      if (first != LoraModule::kNone) {
        part.module = static_cast<LoraModule>(static_cast<int32_t>(first) + args.num_parts);
      }
      ++args.num_parts;
    }
    args.lora = step_.lora();
    args.compute = options_.compute;
    args.scratch = step_.scratch;
    args.scratch_bytes = step_.scratch_bytes;
    timed(name, linear_bytes(args), linear_flops(args), [&] { kernels_cpu().linear(args, stream_); });
  }

  void run_layer(const BenchLayer& layer) {
    const BenchShape& shape = model_.shape;
    const int32_t rows = step_.rows;
    linear("linear q,k,v", {{&layer.q, step_.q}, {&layer.k, step_.k}, {&layer.v, step_.v}}, LoraModule::kQ, rows,
           step_.x);
    linear("linear o", {{&layer.o, step_.hidden}}, LoraModule::kO, rows, step_.x);
    linear("linear router", {{&layer.router, step_.logits}}, LoraModule::kNone, rows, step_.x);
    timed("moe_sort", 0, 0, [&] {
      kernels_cpu().moe_sort({step_.ids.data(), step_.slots.data(), rows, shape.top_k, shape.num_experts, step_.order},
                             stream_);
    });
    double active = 0;
    for (int32_t e = 0; e < shape.num_experts; ++e) {
      active += step_.expert_begin[e + 1] != step_.expert_begin[e];
    }
    const double matrix = static_cast<double>(shape.hidden) * shape.intermediate;
    const double pairs = static_cast<double>(rows) * shape.top_k;
    const double bytes = active * matrix * (shape.mxfp4 ? 0.5 + 1.0 / 32 : 2.0);
    MoeGateUpArgs up;
    up.x = step_.x;
    up.gate = experts(layer.gate, layer.gate_scales, shape.intermediate, shape.hidden, 2);
    up.up = experts(layer.up, layer.up_scales, shape.intermediate, shape.hidden, 2);
    up.act = step_.act;
    set_common(up);
    timed("moe_gate_up", bytes * 2, pairs * matrix * 4, [&] { kernels_cpu().moe_gate_up(up, stream_); });
    MoeDownArgs down;
    down.act = step_.act;
    down.down = experts(layer.down, layer.down_scales, shape.hidden, shape.intermediate, 1);
    down.out = step_.down;
    set_common(down);
    timed("moe_down", bytes, pairs * matrix * 2, [&] { kernels_cpu().moe_down(down, stream_); });
    MoeCombineArgs combine;
    combine.down = step_.down;
    combine.weights = step_.router_weights.data();
    combine.order = step_.order;
    combine.num_rows = rows;
    combine.top_k = shape.top_k;
    combine.width = shape.hidden;
    combine.hidden = step_.hidden;
    timed("moe_combine", 4.0 * pairs * shape.hidden, 2.0 * pairs * shape.hidden,
          [&] { kernels_cpu().moe_combine(combine, stream_); });
  }

  [[nodiscard]] ExpertWeights experts(const std::vector<const void*>& data, const std::vector<const uint8_t*>& scales,
                                      int32_t outputs, int32_t inputs, int32_t step) const {
    ExpertWeights weights{data.data(), Dtype::kBf16, outputs, inputs};
    if (model_.shape.mxfp4) {
      weights.format = ExpertFormat::kMxfp4Rows;
      weights.row_step = step;
      weights.scales = scales.data();
    }
    return weights;
  }

  template <class Args>
  void set_common(Args& args) const {
    args.order = step_.order;
    args.num_rows = step_.rows;
    args.top_k = model_.shape.top_k;
    args.num_experts = model_.shape.num_experts;
    args.lora = step_.lora();
    args.compute = options_.compute;
    args.scratch = step_.scratch;
    args.scratch_bytes = step_.scratch_bytes;
  }

  void run_head() {
    linear("linear lm_head", {{&model_.lm_head, step_.vocab_logits}}, LoraModule::kNone, step_.rows, step_.x);
  }

  void print() const {
    std::printf("rows %d, %s%s: read ceiling %.1f GB/s, multiply-add ceiling %.0f GFLOP/s\n", step_.rows,
                options_.lora ? "adapters on all, " : "base, ", options_.compute == Compute::kBf16 ? "bf16" : "exact",
                median(read_), median(fma_));
    std::printf("  %-16s %10s %10s %10s %10s %8s %8s\n", "op", "us", "MB", "GB/s", "GFLOP/s", "%read", "%fma");
    for (const OpTimes& op : ops_) {
      const double seconds = median(op.seconds);
      std::printf("  %-16s %10.1f %10.2f %10.1f %10.1f %8.1f %8.1f\n", op.name.c_str(), seconds * 1e6, op.bytes * 1e-6,
                  op.bytes / seconds * 1e-9, op.flops / seconds * 1e-9, 100 * median(op.read_share),
                  100 * median(op.fma_share));
    }
  }

  const BenchModel& model_;
  BenchStep step_;
  const Options& options_;
  Stream& stream_;
  std::vector<OpTimes> ops_;
  std::vector<double> read_, fma_;
  size_t at_ = 0;
  size_t cold_ = 0;
  double round_seconds_ = 0, round_bytes_ = 0, round_flops_ = 0;
};

bool parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&] { return i + 1 < argc ? std::atoi(argv[++i]) : 0; };
    if (name == "--rows") {
      options.rows.push_back(value());
    } else if (name == "--threads") {
      options.threads = value();
    } else if (name == "--layers") {
      options.layers = value();
    } else if (name == "--rounds") {
      options.rounds = value();
    } else if (name == "--lora") {
      options.lora = true;
    } else if (name == "--mxfp4") {
      options.mxfp4 = true;
    } else if (name == "--bf16") {
      options.compute = Compute::kBf16;
    } else {
      return false;
    }
  }
  return options.threads >= 1 && options.layers >= 1 && options.rounds >= 1 &&
         *std::min_element(options.rows.begin(), options.rows.end()) >= 1;
}

int bench_main(int argc, char** argv) {
  Options options;
  if (!parse(argc, argv, options)) {
    std::fprintf(stderr,
                 "op_bench [--rows N]... [--lora] [--bf16] [--mxfp4] [--threads N] [--layers N] [--rounds N]\n");
    return 2;
  }
  Stream stream(options.threads, size_t{2} << 20);
  BenchShape shape;
  shape.layers = options.layers;
  if (!options.lora) {
    shape.adapters = 0;
  }
  if (options.mxfp4) {
    shape.hidden = shape.intermediate = 2880;
    shape.num_experts = 32;
    shape.top_k = 4;
    shape.mxfp4 = true;
  }
  const BenchModel model(shape, stream);
  for (const int32_t rows : options.rows) {
    Bench(model, rows, options, stream).run();
  }
  return 0;
}

}  // namespace
}  // namespace moelora

int main(int argc, char** argv) {
  return moelora::bench_main(argc, argv);
}
