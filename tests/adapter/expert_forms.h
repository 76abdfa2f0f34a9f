// SPDX-License-Identifier: Apache-2.0
// Random expert deltas and every stored form they can be written in: per-expert 2-D, PEFT's ParamWrapper (natural,
// reversed, grouped by expert, fused of rank 2r) and the stacked 3-D exports. Written from the formats' descriptions;
// shares no code with the loader.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/adapter/adapter_files.h"
#include "tests/support/unpacked_image.h"

namespace moelora::test {

constexpr int32_t kFormRank = 3;
constexpr double kFormAlpha = 7.5;

struct Matrix {
  int32_t rows = 0;
  int32_t cols = 0;
  std::vector<float> values;
  [[nodiscard]] float at(int32_t i, int32_t j) const { return values[static_cast<size_t>(i * cols + j)]; }
};

inline Matrix draw_matrix(Draw& draw, int32_t rows, int32_t cols) {
  return {rows, cols, draw.floats(static_cast<size_t>(rows * cols))};
}

// The pairs of one expert: A [r, in], B [out, r] of gate, up, down.
struct ExpertPairs {
  Matrix a[3];
  Matrix b[3];
};

struct Truth {
  ModelConfig model;
  std::vector<std::vector<ExpertPairs>> layers;  // [layer][expert]
};

// Which matrices several linears share: a form can be written only where its own sharing holds.
struct Sharing {
  bool gate_up_a = false;  // gate and up of an expert
  bool outer = false;      // A of gate and of up, B of down: one for all experts
};

inline Truth draw_truth(const ModelConfig& model, const Sharing& sharing, uint32_t seed) {
  Draw draw(seed);
  Truth truth{model, {}};
  const int32_t hidden = model.hidden_size;
  const int32_t width = model.moe_intermediate_size;
  for (int32_t layer = 0; layer < model.num_layers; ++layer) {
    std::vector<ExpertPairs> experts;
    for (int32_t e = 0; e < model.num_experts; ++e) {
      ExpertPairs pairs;
      for (int32_t m = 0; m < 3; ++m) {
        const bool down = m == 2;
        pairs.a[m] = draw_matrix(draw, kFormRank, down ? width : hidden);
        pairs.b[m] = draw_matrix(draw, down ? hidden : width, kFormRank);
      }
      if (sharing.gate_up_a) {
        pairs.a[1] = pairs.a[0];
      }
      if (sharing.outer && e > 0) {
        pairs.a[0] = experts[0].a[0];
        pairs.a[1] = experts[0].a[1];
        pairs.b[2] = experts[0].b[2];
      }
      experts.push_back(std::move(pairs));
    }
    truth.layers.push_back(std::move(experts));
  }
  return truth;
}

inline Delta true_delta(const Truth& truth, int32_t layer, int32_t expert, int32_t module) {
  const ExpertPairs& pairs = truth.layers[static_cast<size_t>(layer)][static_cast<size_t>(expert)];
  const Matrix& a = pairs.a[module];
  const Matrix& b = pairs.b[module];
  Delta delta{true, b.rows, a.cols, kFormRank, {}, {}};
  for (int32_t n = 0; n < b.rows; ++n) {
    for (int32_t k = 0; k < a.cols; ++k) {
      double sum = 0.0;
      for (int32_t r = 0; r < kFormRank; ++r) {
        sum += static_cast<double>(b.at(n, r)) * static_cast<double>(a.at(r, k));
      }
      delta.values.push_back(kFormAlpha / kFormRank * sum);
    }
  }
  return delta;
}

// One 3-D parameter's pair of an expert in its natural form.
struct Parameter {
  Matrix a;  // [r, in]
  Matrix b;  // [out, r]
};

using ParameterOf = std::function<Parameter(const ExpertPairs&)>;

inline Matrix stack_rows(const Matrix& top, const Matrix& bottom) {
  Matrix result{top.rows + bottom.rows, top.cols, top.values};
  result.values.insert(result.values.end(), bottom.values.begin(), bottom.values.end());
  return result;
}

inline Parameter gate_up_shared_a(const ExpertPairs& pairs) {
  return {pairs.a[0], stack_rows(pairs.b[0], pairs.b[1])};
}

// PEFT's conversion of per-expert files: rank 2r, B block-diagonal.
inline Parameter gate_up_fused(const ExpertPairs& pairs) {
  const Matrix& gate = pairs.b[0];
  const Matrix& up = pairs.b[1];
  Matrix b{gate.rows + up.rows, 2 * kFormRank,
           std::vector<float>(static_cast<size_t>((gate.rows + up.rows) * 2 * kFormRank))};
  for (int32_t n = 0; n < gate.rows; ++n) {
    for (int32_t r = 0; r < kFormRank; ++r) {
      b.values[static_cast<size_t>(n * 2 * kFormRank + r)] = gate.at(n, r);
      b.values[static_cast<size_t>((gate.rows + n) * 2 * kFormRank + kFormRank + r)] = up.at(n, r);
    }
  }
  return {stack_rows(pairs.a[0], pairs.a[1]), b};
}

// gpt-oss: gate and up of an output by turns.
inline Parameter by_turns(const Parameter& halves) {
  Parameter result = halves;
  const int32_t width = halves.b.rows / 2;
  const auto row = halves.b.values.begin();
  for (int32_t n = 0; n < halves.b.rows; ++n) {
    std::copy_n(row + n * halves.b.cols, halves.b.cols,
                result.b.values.begin() + (n < width ? 2 * n : 2 * (n - width) + 1) * halves.b.cols);
  }
  return result;
}

// The parameter in the order of the family's outputs.
inline ParameterOf in_family_order(const ModelConfig& model, const ParameterOf& gate_up) {
  return model.family != Family::kGptOss
             ? gate_up
             : ParameterOf([gate_up](const ExpertPairs& pairs) { return by_turns(gate_up(pairs)); });
}

inline Parameter down_parameter(const ExpertPairs& pairs) {
  return {pairs.a[2], pairs.b[2]};
}

struct WrapperForm {
  bool reversed = false;
  bool grouped = false;
};

inline Matrix transposed(const Matrix& matrix) {
  Matrix result{matrix.cols, matrix.rows, {}};
  for (int32_t j = 0; j < matrix.cols; ++j) {
    for (int32_t i = 0; i < matrix.rows; ++i) {
      result.values.push_back(matrix.at(i, j));
    }
  }
  return result;
}

// PEFT's ParamWrapper: A viewed [E, r, c_in], B viewed [c_out, r, E] (or [c_out, E, r], grouped).
inline void write_wrapper(SafetensorsWriter& writer, const std::string& name, const std::vector<ExpertPairs>& experts,
                          const ParameterOf& parameter_of, const WrapperForm& form) {
  std::vector<Parameter> parameters;
  for (const ExpertPairs& pairs : experts) {
    Parameter p = parameter_of(pairs);
    parameters.push_back(form.reversed ? Parameter{transposed(p.b), transposed(p.a)} : p);
  }
  const auto count = static_cast<int32_t>(experts.size());
  const int32_t rank = parameters[0].a.rows;
  const int32_t c_in = parameters[0].a.cols;
  const int32_t c_out = parameters[0].b.rows;
  std::vector<float> a;
  for (const Parameter& p : parameters) {
    a.insert(a.end(), p.a.values.begin(), p.a.values.end());
  }
  std::vector<float> b;
  for (int32_t n = 0; n < c_out; ++n) {
    for (int32_t column = 0; column < rank * count; ++column) {
      const int32_t e = form.grouped ? column / rank : column % count;
      const int32_t r = form.grouped ? column % rank : column / count;
      b.push_back(parameters[static_cast<size_t>(e)].b.at(n, r));
    }
  }
  writer.add(name + ".lora_A.weight", {count * rank, c_in}, a);
  writer.add(name + ".lora_B.weight", {c_out, rank * count}, b);
}

// 3-D: A [E or 1, r, in], B [E or 1, out, r].
inline void write_stacked(SafetensorsWriter& writer, const std::string& name, const std::vector<ExpertPairs>& experts,
                          const ParameterOf& parameter_of, bool one_a = false, bool one_b = false) {
  std::vector<float> a;
  std::vector<float> b;
  Parameter p;
  for (size_t e = 0; e < experts.size(); ++e) {
    p = parameter_of(experts[e]);
    if (e == 0 || !one_a) {
      a.insert(a.end(), p.a.values.begin(), p.a.values.end());
    }
    if (e == 0 || !one_b) {
      b.insert(b.end(), p.b.values.begin(), p.b.values.end());
    }
  }
  const auto count = static_cast<int64_t>(experts.size());
  writer.add(name + ".lora_A", {one_a ? 1 : count, p.a.rows, p.a.cols}, a);
  writer.add(name + ".lora_B", {one_b ? 1 : count, p.b.rows, p.b.cols}, b);
}

inline std::string experts_name(int32_t layer) {
  return kLayerPrefix + std::to_string(layer) + ".mlp.experts";
}

inline SafetensorsWriter write_each(const Truth& truth,
                                    const std::function<void(SafetensorsWriter&, int32_t)>& write_layer) {
  SafetensorsWriter writer;
  for (int32_t layer = 0; layer < truth.model.num_layers; ++layer) {
    write_layer(writer, layer);
  }
  return writer;
}

inline SafetensorsWriter per_expert_file(const Truth& truth) {
  const bool mixtral = truth.model.family == Family::kMixtral;
  const std::vector<std::string> names = mixtral ? std::vector<std::string>{"w1", "w3", "w2"}
                                                 : std::vector<std::string>{"gate_proj", "up_proj", "down_proj"};
  return write_each(truth, [&](SafetensorsWriter& writer, int32_t layer) {
    const std::string block = mixtral ? ".block_sparse_moe.experts." : ".mlp.experts.";
    for (int32_t e = 0; e < truth.model.num_experts; ++e) {
      const ExpertPairs& pairs = truth.layers[static_cast<size_t>(layer)][static_cast<size_t>(e)];
      for (int32_t m = 0; m < 3; ++m) {
        const std::string name =
            kLayerPrefix + std::to_string(layer) + block + std::to_string(e) + "." + names[static_cast<size_t>(m)];
        writer.add(name + ".lora_A.weight", {kFormRank, pairs.a[m].cols}, pairs.a[m].values);
        writer.add(name + ".lora_B.weight", {pairs.b[m].rows, kFormRank}, pairs.b[m].values);
      }
    }
  });
}

inline SafetensorsWriter wrapper_file(const Truth& truth, const ParameterOf& gate_up, const WrapperForm& form) {
  return write_each(truth, [&](SafetensorsWriter& writer, int32_t layer) {
    const auto& experts = truth.layers[static_cast<size_t>(layer)];
    write_wrapper(writer, experts_name(layer) + ".base_layer", experts, in_family_order(truth.model, gate_up), form);
    write_wrapper(writer, experts_name(layer), experts, down_parameter, form);
  });
}

inline SafetensorsWriter w123_file(const Truth& truth, bool outer) {
  return write_each(truth, [&](SafetensorsWriter& writer, int32_t layer) {
    const auto& experts = truth.layers[static_cast<size_t>(layer)];
    const auto module = [](int32_t m) { return [m](const ExpertPairs& p) { return Parameter{p.a[m], p.b[m]}; }; };
    write_stacked(writer, experts_name(layer) + ".w1", experts, module(0), outer, false);
    write_stacked(writer, experts_name(layer) + ".w3", experts, module(1), outer, false);
    write_stacked(writer, experts_name(layer) + ".w2", experts, module(2), false, outer);
  });
}

inline SafetensorsWriter stacked_gate_up_file(const Truth& truth, bool two_blocks) {
  return write_each(truth, [&](SafetensorsWriter& writer, int32_t layer) {
    const auto& experts = truth.layers[static_cast<size_t>(layer)];
    const ParameterOf gate_up = [&](const ExpertPairs& p) {
      return Parameter{two_blocks ? stack_rows(p.a[0], p.a[1]) : p.a[0], stack_rows(p.b[0], p.b[1])};
    };
    write_stacked(writer, experts_name(layer) + ".gate_up_proj", experts, in_family_order(truth.model, gate_up));
    write_stacked(writer, experts_name(layer) + ".down_proj", experts, down_parameter);
  });
}

}  // namespace moelora::test
