// SPDX-License-Identifier: Apache-2.0
// RoPE scaling against values computed independently in double precision, and the refusal of what is not implemented.
#include "runtime/model/rope.h"

#include <cmath>
#include <utility>
#include <vector>

#include "kernels/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/expect_error.h"

using namespace moelora;
using namespace moelora::test;

namespace {

RopeParameters parse(const std::string& config, int64_t max_position = 4096,
                     const std::string& layer_type = "full_attention") {
  return parse_rope(parse_json(config, "config.json"), max_position, 10000.0, layer_type, "config.json");
}

double relative(double actual, double expected) {
  return std::abs(actual - expected) / std::abs(expected);
}

void check_table(const RopeTable& table, const std::vector<std::pair<size_t, double>>& expected) {
  for (const auto& [index, value] : expected) {
    INFO("inv_freq[" << index << "] = " << table.inv_freq.at(index) << ", expected " << value);
    CHECK(relative(table.inv_freq.at(index), value) < 1e-6);
  }
}

}  // namespace

TEST_CASE("rope: default and linear") {
  const RopeTable plain = rope_table(parse(R"({"rope_theta": 1000000.0})"), 16);
  REQUIRE(plain.inv_freq.size() == 8);
  check_table(plain, {{0, 1.0}, {5, 0.00017782794100389227}, {7, 5.623413251903491e-06}});
  CHECK(plain.attention_factor == 1.0);
  const RopeTable linear =
      rope_table(parse(R"({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4}})"), 16);
  check_table(linear, {{0, 0.25}, {5, 0.00017782794100389227 / 4}, {7, 5.623413251903491e-06 / 4}});
  CHECK(linear.attention_factor == 1.0);
  CHECK(parse("{}").theta == 10000.0);
}

TEST_CASE("rope: yarn without truncation (d 64, base 150000, factor 32, original 4096)") {
  const RopeTable table = rope_table(parse(R"({"rope_theta": 150000, "max_position_embeddings": 131072, "rope_scaling":
      {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
       "original_max_position_embeddings": 4096, "truncate": false}})",
                                           131072),
                                     64);
  check_table(table, {{0, 1.0},
                      {1, 0.6890443058881632},
                      {8, 0.050813274815461475},
                      {10, 0.01933500112654036},
                      {13, 0.0038603593171920685},
                      {17, 1.293187012450632e-4},
                      {18, 3.8308812373753384e-5},
                      {31, 3.0235114281192144e-7}});
  CHECK(relative(table.attention_factor, 1.3465735902799727) < 1e-12);
}

TEST_CASE("rope: yarn with truncation and mscale (d 64, base 10000, factor 40, original 4096)") {
  const std::string yarn = R"("factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096)";
  const RopeTable table = rope_table(
      parse(R"({"rope_scaling": {"type": "yarn", "mscale": 0.707, "mscale_all_dim": 0.707, )" + yarn + "}}"), 64);
  check_table(table, {{0, 1.0},
                      {9, 0.07498942093324558},
                      {10, 0.05623413251903491},
                      {11, 0.03900692656714386},
                      {16, 0.0055},
                      {22, 1.778279410038922e-4},
                      {23, 3.33380358040831e-5},
                      {24, 2.5e-5},
                      {31, 3.3338035804083097e-6}});
  CHECK(table.attention_factor == 1.0);
  // mscale alone has no effect; different values give m(40, 1) / m(40, 0.5), m(f, c) = 0.1 c ln f + 1.
  const double full = 0.1 * std::log(40.0) + 1.0;
  CHECK(
      relative(
          rope_table(parse(R"({"rope_scaling": {"type": "yarn", "mscale": 2.0, )" + yarn + "}}"), 64).attention_factor,
          full) < 1e-12);
  CHECK(relative(
            rope_table(
                parse(R"({"rope_scaling": {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.5, )" + yarn + "}}"), 64)
                .attention_factor,
            full / (0.05 * std::log(40.0) + 1.0)) < 1e-12);
  CHECK(rope_table(parse(R"({"rope_scaling": {"type": "yarn", "attention_factor": 1.25, )" + yarn + "}}"), 64)
            .attention_factor == 1.25);
}

TEST_CASE("rope: llama3 (d 128, base 5e5, factor 8, original 8192)") {
  const RopeTable table = rope_table(parse(R"({"rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3",
      "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}})"),
                                     128);
  check_table(table, {{20, 0.016560440080994446},
                      {28, 0.003211445994752591},
                      {29, 0.002166570763503359},
                      {30, 0.0013718935677611381},
                      {31, 8.567514129196321e-4},
                      {32, 5.248461609929547e-4},
                      {34, 1.785078127679964e-4},
                      {35, 9.556212353964683e-5},
                      {36, 7.78465527393245e-5},
                      {63, 3.068925988914511e-7}});
  CHECK(table.attention_factor == 1.0);
  // low = high leaves no band to blend in: each frequency is either kept or divided by the factor.
  const RopeTable step =
      rope_table(parse(R"({"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 16,
      "low_freq_factor": 1, "high_freq_factor": 1, "original_max_position_embeddings": 8192}})"),
                 128);
  for (size_t i = 0; i < 64; ++i) {
    const double inv = std::pow(500000.0, -static_cast<double>(i) / 64.0);
    const double expected = 2.0 * 3.14159265358979 / inv > 8192.0 ? inv / 16.0 : inv;
    CHECK(relative(step.inv_freq[i], expected) < 1e-9);
  }
}

TEST_CASE("rope: where values are read from") {
  // The newer place wins.
  const RopeParameters both = parse(R"({"rope_theta": 3.0, "rope_scaling": {"type": "linear", "factor": 2},
                                        "rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}})");
  CHECK(both.theta == 5.0);
  CHECK(both.type == "default");
  // A base alone in the newer place leaves the scaling to the older one.
  const RopeParameters mixed =
      parse(R"({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 5.0}})");
  CHECK(mixed.type == "linear");
  CHECK(mixed.theta == 5.0);
  CHECK(mixed.factor == 2.0);
  CHECK(parse(R"({"rope_scaling": null, "rope_parameters": null, "rope_theta": 7})").type == "default");
  // Nested by layer type.
  const std::string nested =
      R"({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2, "rope_theta": 5},
                                 "sliding_attention": {"rope_type": "default", "rope_theta": 6}}})";
  CHECK(parse(nested).theta == 5.0);
  CHECK(parse(nested).type == "linear");
  CHECK(parse(nested, 4096, "sliding_attention").theta == 6.0);
  CHECK_ERROR(Status::kCorrupt, ({"rope_parameters", "chunked"}), parse(nested, 4096, "chunked"));
  // original_max_position_embeddings: top level, then the scaling object, then max_position_embeddings.
  const std::string yarn = R"("rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 512})";
  CHECK(parse("{" + yarn + "}").original_max_position == 512.0);
  CHECK(parse("{\"original_max_position_embeddings\": 256, " + yarn + "}").original_max_position == 256.0);
  CHECK(parse(R"({"rope_scaling": {"type": "yarn", "factor": 2}})", 2048).original_max_position == 2048.0);
  // yarn without factor: max / original.
  CHECK(parse(R"({"rope_scaling": {"type": "yarn", "factor": null, "original_max_position_embeddings": 512}})", 2048)
            .factor == 4.0);
}

TEST_CASE("rope: refusals name the type or the key") {
  for (const char* type : {"dynamic", "longrope", "proportional", "su", "mrope", ""}) {
    const std::string config = std::string(R"({"rope_scaling": {"rope_type": ")") + type + R"(", "factor": 2}})";
    const Status status = *type == '\0' ? Status::kCorrupt : Status::kUnsupported;
    CHECK_ERROR(status, ({"config.json", "rope_type", std::string(type)}), parse(config));
  }
  CHECK_ERROR(Status::kUnsupported, ({"rope_parameters", "mrope_section"}),
              parse(R"({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}})"));
  CHECK_ERROR(Status::kUnsupported, ({"partial_rotary_factor", "0.5"}), parse(R"({"partial_rotary_factor": 0.5})"));
  CHECK_ERROR(Status::kCorrupt, ({"rope_type 'yarn'", "type 'linear'"}),
              parse(R"({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2}})"));
  CHECK_ERROR(Status::kCorrupt, ({"rope_scaling", "rope_type"}), parse(R"({"rope_scaling": {"factor": 2}})"));
  CHECK_ERROR(Status::kCorrupt, ({"rope_scaling", "object"}), parse(R"({"rope_scaling": 2})"));
  CHECK_ERROR(Status::kCorrupt, ({"'factor'", "missing"}), parse(R"({"rope_scaling": {"type": "linear"}})"));
  CHECK_ERROR(Status::kCorrupt, ({"'factor'", "at least 1"}),
              parse(R"({"rope_scaling": {"type": "linear", "factor": 0}})"));
  CHECK_ERROR(
      Status::kCorrupt, ({"'high_freq_factor'", "at least 4"}),
      parse(R"({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}})"));
  CHECK_ERROR(Status::kCorrupt, ({"'low_freq_factor'", "missing"}),
              parse(R"({"rope_scaling": {"type": "llama3", "factor": 8, "high_freq_factor": 1}})"));
  CHECK_ERROR(Status::kCorrupt, ({"beta_fast", "beta_slow"}),
              parse(R"({"rope_scaling": {"type": "yarn", "factor": 8, "beta_fast": 1, "beta_slow": 32}})"));
  CHECK_ERROR(Status::kCorrupt, ({"rope_theta"}), parse(R"({"rope_theta": 0})"));
  CHECK_ERROR(Status::kCorrupt, ({"rope_theta", "number"}), parse(R"({"rope_theta": "10000"})"));
}
