// SPDX-License-Identifier: Apache-2.0
// What an engine refuses before it takes memory.
#include "runtime/engine/memory_plan.h"

#include <string>

#include "kernels/base/error.h"
#include "tests/support/catch.h"

using moelora::check_batch_tokens;
using moelora::Error;
using moelora::ModelConfig;
using moelora::Status;

TEST_CASE("a step of more pairs than the ops take is refused by the option's name", "[engine]") {
  ModelConfig config;
  config.num_experts = 128;
  config.top_k = 8;
  check_batch_tokens(config, 8192, 65536);
  check_batch_tokens(config, 1 << 30, 0);  // any number
  try {
    check_batch_tokens(config, 8193, 65536);
    FAIL("not refused");
  } catch (const Error& error) {
    CHECK(error.status() == Status::kInvalid);
    CHECK(std::string(error.what()) == "max_batch_tokens = 8193: with 8 experts a token at most 8192 on this device");
  }
  config.num_experts = 0;  // dense
  check_batch_tokens(config, 1 << 30, 65536);
}
