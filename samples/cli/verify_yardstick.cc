// SPDX-License-Identifier: Apache-2.0
// See verify_yardstick.h.
#include "samples/cli/verify_yardstick.h"

namespace moelora_cli {
namespace {

constexpr float kScaleChange = 0x1p-9f;

// The user's options hold but for what makes the engine another one; settings of a later place win.
EngineFlags on_cpu(EngineFlags flags, const std::string& compute, const std::string& kv_dtype,
                   const ReferenceCase& folder) {
  flags.model = flags.model.empty() ? folder.model_dir() : flags.model;
  flags.settings.insert(flags.settings.end(), {"device=cpu", "compute=" + compute, "kv_dtype=" + kv_dtype});
  return flags;
}

}  // namespace

FedEngine::FedEngine(EngineFlags flags, const std::string& compute, const std::string& kv_dtype,
                     const ReferenceCase& folder)
    : folder_(folder), engine_(on_cpu(std::move(flags), compute, kv_dtype, folder)) {}

std::vector<float> FedEngine::answer(const Case& reference, float scale, std::vector<double>* router_gaps) {
  std::vector<int32_t> tokens = reference.prompt;
  tokens.insert(tokens.end(), reference.greedy.begin(), reference.greedy.end() - 1);
  moelora_sampling sampling;
  moelora_sampling_init(&sampling);
  sampling.max_tokens = 1;
  sampling.flags = MOELORA_SAMPLING_IGNORE_EOS;
  Request request(engine_.get());
  request.set_tokens(tokens);
  request.set_sampling(sampling);
  if (const std::string& name = reference.adapter; !name.empty()) {
    if (!adapters_.contains(name)) {
      adapters_[name] = engine_.load({name, folder_.adapter_dir(name)});
    }
    request.set_adapter(adapters_[name], scale);
  }
  must(moelora_request_capture_logits, engine_.get(), request.handle(), 0);
  request.submit();
  request.read_to_end();
  int32_t first = -1;
  const int32_t rows = request.captured(&first);
  if (first != 0 || rows != static_cast<int32_t>(tokens.size())) {
    throw Failure(MOELORA_E_INTERNAL, reference.name + ": the CPU engine captured " + std::to_string(rows) +
                                          " rows from position " + std::to_string(first));
  }
  std::vector<float> logits;
  for (int32_t row = 0; row < rows; ++row) {
    const std::vector<float> of_row = request.captured_row(row);
    logits.insert(logits.end(), of_row.begin(), of_row.end());
    if (router_gaps != nullptr) {
      router_gaps->push_back(request.router_gap(row));
    }
  }
  return logits;
}

YardstickEngines::YardstickEngines(const EngineFlags& flags, const ReferenceCase& folder, bool with_rounded)
    : folder_(folder), exact_(flags, "exact", "f32", folder) {
  if (!with_rounded) {
    return;
  }
  rounded_.emplace_back(flags, "bf16", "bf16", folder);
  rounded_.emplace_back(flags, "bf16", "f32", folder);
  rounded_.emplace_back(flags, "exact", "bf16", folder);
  rounded_model_ = RoundedModel::of(flags.model.empty() ? folder.model_dir() : flags.model);
  if (rounded_model_) {
    EngineFlags of_rounded = flags;
    of_rounded.model = rounded_model_->dir().string();
    rounded_.emplace_back(of_rounded, "bf16", "bf16", folder);
  }
}

const Yardstick& YardstickEngines::of(size_t index) {
  const auto [entry, is_new] = measured_.try_emplace(index);
  Yardstick& yardstick = entry->second;
  if (is_new) {
    const Case& reference = folder_.cases[index];
    yardstick.exact = exact_.answer(reference, 1, &yardstick.router_gaps);
    for (FedEngine& engine : rounded_) {
      yardstick.rounded.push_back(engine.answer(reference, 1, nullptr));
    }
    if (!rounded_.empty() && !reference.adapter.empty()) {
      yardstick.rounded.push_back(rounded_.front().answer(reference, 1 + kScaleChange, nullptr));
      yardstick.rounded.push_back(rounded_.front().answer(reference, 1 - kScaleChange, nullptr));
    }
  }
  return yardstick;
}

}  // namespace moelora_cli
