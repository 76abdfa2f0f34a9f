// SPDX-License-Identifier: Apache-2.0
// Random damage to a small safetensors file: the reader either refuses it with Error or hands out tensors whose every
// byte may be read. Seeds are fixed; under AddressSanitizer a byte outside the buffer ends the test.
#include <cstring>
#include <memory>
#include <random>

#include "kernels/base/error.h"
#include "runtime/io/safetensors.h"
#include "tests/support/catch.h"
#include "tests/support/model_files.h"

using namespace moelora;
using namespace moelora::test;

namespace {

std::string small_file() {
  SafetensorsBuilder builder;
  builder.add("model.embed.weight", "BF16", {4, 3}, std::string(24, 'e'));
  builder.add("model.norm.weight", "F32", {3}, std::string(12, 'n'));
  builder.add("empty", "I64", {0}, "");
  builder.add("byte", "U8", {}, "b");
  return builder.text();
}

// Reads every byte of every tensor; returns whether the file was accepted.
bool survive(const std::string& text) {
  // A buffer of exactly this size, so that a read past its end is seen.
  const std::unique_ptr<std::byte[]> data(new std::byte[text.size()]);
  std::memcpy(data.get(), text.data(), text.size());
  try {
    const ByteSource source(data.get(), text.size(), "fuzz");
    const auto file = SafetensorsFile::from_header(SafetensorsFile::read_header(source), source);
    unsigned sum = 0;
    for (const StoredTensor& tensor : file->tensors()) {
      for (size_t i = 0; i < tensor.bytes; ++i) {
        sum += std::to_integer<unsigned>(tensor.data[i]);
      }
      if (tensor.elements() < 0 || tensor.shape_text().empty()) {
        throw std::runtime_error("bad tensor");
      }
    }
    return sum != 1;  // keeps the reads
  } catch (const Error& error) {
    if (error.status() != Status::kCorrupt || std::string(error.what()).find("fuzz") == std::string::npos) {
      throw;
    }
    return false;
  }
}

}  // namespace

TEST_CASE("safetensors fuzz: flipped bits and bytes") {
  const std::string good = small_file();
  REQUIRE(survive(good));
  std::mt19937 random(20240611);
  int refused = 0;
  for (int round = 0; round < 30000; ++round) {
    std::string text = good;
    const unsigned edits = 1 + random() % 4;
    for (unsigned i = 0; i < edits; ++i) {
      const size_t at = random() % text.size();
      text[at] = random() % 2 == 0 ? static_cast<char>(random()) : static_cast<char>(text[at] ^ (1 << (random() % 8)));
    }
    refused += survive(text) ? 0 : 1;
  }
  CHECK(refused > 10000);
}

TEST_CASE("safetensors fuzz: every truncation is refused") {
  const std::string good = small_file();
  for (size_t length = 0; length < good.size(); ++length) {
    CHECK_FALSE(survive(good.substr(0, length)));
  }
}

TEST_CASE("safetensors fuzz: digits, deletions and repetitions in the header") {
  const std::string good = small_file();
  std::mt19937 random(7);
  int refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string text = good;
    const size_t at = 8 + random() % (text.size() - 45);
    const size_t count = 1 + random() % 12;
    switch (random() % 3) {
      case 0:
        text.erase(at, count);
        break;
      case 1:
        text.insert(at, text.substr(at, count));
        break;
      default:
        text.insert(at, std::to_string(random()));
        break;
    }
    const uint64_t header = text.size() - 8 - 37;  // 37 bytes of data: the header keeps its end
    std::memcpy(text.data(), &header, 8);
    refused += survive(text) ? 0 : 1;
  }
  CHECK(refused > 10000);
}
