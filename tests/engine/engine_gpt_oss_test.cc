// SPDX-License-Identifier: Apache-2.0
// gpt-oss through the engine where no reference case holds it: both stored forms of the same weights, square experts,
// and LoRA on the router against the same model with the delta merged by hand.
#include "tests/engine/engine_support.h"
#include "tests/model/gpt_oss_files.h"

namespace moelora::test {
namespace {

std::shared_ptr<Engine> open(const RawTensors& tensors, const std::string& config, const std::string& kernels) {
  const TempDir dir;
  write_file(dir.file("config.json"), config);
  write_tensors(dir, tensors);
  EngineOptions options;
  options.num_threads = 2;
  options.kernels = kernels;
  return Engine::create(options, dir.path());
}

std::vector<float> logits_of(Engine& engine, const std::shared_ptr<Adapter>& adapter = nullptr) {
  Request request;
  Draw draw(99);
  for (int i = 0; i < 40; ++i) {
    request.prompt.push_back(draw.below(320));
  }
  request.adapter = adapter;
  request.capture_from = 0;
  const std::vector<float> logits = test::logits_of(engine, request);
  REQUIRE(logits.size() == 40 * 320);
  return logits;
}

}  // namespace

TEST_CASE("MXFP4 rows and a bf16 file of the same weights give the same bits, square experts included",
          "[engine][gpt-oss]") {
  for (const char* kernels : {"auto", "reference"}) {
    for (const int64_t width : {64, 32, 96}) {
      INFO(kernels << " I = " << width);
      const RawTensors packed = draw_gpt_oss(width, 11);
      RawTensors plain = packed;
      unpack_layer(plain, 0);
      unpack_layer(plain, 1);
      const std::vector<float> expected = logits_of(*open(packed, gpt_oss_config(width, true), kernels));
      CHECK(logits_of(*open(plain, gpt_oss_config(width, false), kernels)) == expected);
      // A transposed reading of the square matrix would not pass unnoticed.
      if (width == 64) {
        RawTensors wrong = packed;
        const std::string name = experts_path(0) + "down_proj_blocks";
        std::string& bytes = wrong[name].bytes;
        std::reverse(bytes.begin(), bytes.end());
        CHECK(difference(logits_of(*open(wrong, gpt_oss_config(width, true), kernels)), expected) > 1e-2);
      }
    }
  }
}

TEST_CASE("LoRA on the router of gpt-oss moves the choice of experts", "[engine][gpt-oss]") {
  const RawTensors base = read_tensors(case_model("gpt_oss_mxfp4"));
  const std::string config = gpt_oss_config(96, true);
  RawTensors merged = base;
  SafetensorsWriter writer;
  Draw draw(12);
  for (int layer = 0; layer < 2; ++layer) {
    const std::string module = "model.layers." + std::to_string(layer) + ".mlp.router";
    const std::vector<float> a = draw.floats(4 * 64, 0.5f);
    const std::vector<float> b = draw.floats(8 * 4, 0.5f);
    writer.add("base_model.model." + module + ".lora_A.weight", {4, 64}, a);
    writer.add("base_model.model." + module + ".lora_B.weight", {8, 4}, b);
    Raw& weight = merged[module + ".weight"];
    std::vector<float> values;
    for (size_t n = 0; n < 8; ++n) {
      for (size_t k = 0; k < 64; ++k) {
        double sum = static_cast<double>(load_element(weight.bytes.data(), Dtype::kBf16, n * 64 + k));
        for (size_t r = 0; r < 4; ++r) {
          sum += 2.0 * static_cast<double>(b[n * 4 + r]) * static_cast<double>(a[r * 64 + k]);
        }
        values.push_back(static_cast<float>(sum));
      }
    }
    weight = {"F32", {8, 64}, encode_values("F32", values)};
  }
  const std::string adapter_config =
      R"({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "peft_version": "0.21.0", "target_modules": [],
          "target_parameters": ["mlp.router.weight"]})";
  const std::string text = writer.text();
  const auto engine = open(base, config, "auto");
  const auto image = load_adapter_memory(adapter_config, reinterpret_cast<const std::byte*>(text.data()), text.size(),
                                         engine->info().config, engine->adapter_load_options());
  CHECK(image->warnings.empty());
  const auto adapter = engine->register_adapter("router", image, 1.0f, false);
  const std::vector<float> expected = logits_of(*open(merged, config, "auto"));
  CHECK(difference(logits_of(*engine, adapter), expected) <= 1e-4);
  CHECK(difference(logits_of(*engine), expected) >= 1e-2);
}

TEST_CASE("random gpt-oss weights give sane logits", "[engine][gpt-oss]") {
  for (const char* name : {"gpt_oss", "gpt_oss_mxfp4"}) {
    EngineOptions options;
    options.num_threads = 2;
    options.random_weights = true;
    const auto engine = Engine::create(options, case_model(name));
    for (const float logit : logits_of(*engine)) {
      REQUIRE(std::abs(logit) < 100.0f);
    }
  }
}

namespace {

// Active experts a layer, the mean over the decode steps of eight streams.
double active_experts(const std::string& model, const std::string& routing) {
  EngineOptions options;
  options.num_threads = 2;
  options.random_weights = true;
  options.random_routing = routing;
  options.random_routing_exponent = 2.0;
  const auto engine = Engine::create(options, case_model(model));
  std::vector<std::shared_ptr<Submission>> submissions;
  for (int32_t i = 0; i < 8; ++i) {
    Request request;
    request.prompt = {3 + i, 50 - i, 7 * i + 1};
    request.sampling.max_tokens = 24;
    request.sampling.ignore_eos = true;
    submissions.push_back(make_submission(*engine, request));
  }
  std::vector<Error> errors;
  engine->submit_batch(submissions, &errors);
  for (const auto& submission : submissions) {
    read_all(*submission);
  }
  double sum = 0;
  double count = 0;
  for (const StepRecord& step : engine->step_records(1000)) {
    if (step.rows == 8 && step.prefill_rows == 0) {
      sum += static_cast<double>(step.active_experts);
      ++count;
    }
  }
  REQUIRE(count > 0);
  return sum / count;
}

}  // namespace

TEST_CASE("random models route as they are told, with and without a bias of the router", "[engine][gpt-oss]") {
  for (const char* name : {"gpt_oss", "qwen3_moe"}) {
    INFO(name);
    const int32_t top_k = load_model_config(case_model(name)).top_k;
    CHECK(active_experts(name, "one") == static_cast<double>(top_k));
    const double zipf = active_experts(name, "zipf");
    const double random = active_experts(name, "random");
    CHECK(zipf > top_k);
    CHECK(zipf < random);
  }
}

}  // namespace moelora::test
