// SPDX-License-Identifier: Apache-2.0
// The safetensors container: 8 bytes of little-endian header length, a JSON header, then the data of all tensors
// without gaps. All checks happen when a file is opened, so that whoever holds a StoredTensor may read `bytes`
// bytes at `data` and knows that they match dtype and shape. Loading of weights and adapters starts here.
#include "runtime/io/safetensors.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include <fmt/format.h>

#include "kernels/base/error.h"
#include "runtime/io/json.h"
#include "runtime/io/mapped_file.h"

namespace moelora {
namespace {

constexpr size_t kHeaderBytesMax = size_t{100} << 20;
constexpr char kLfsMark[] = "version https://git-lfs";

// 0 for a dtype that this program does not know; such a tensor may be carried along but not used.
size_t stored_dtype_bytes(const std::string& dtype) {
  static const std::unordered_map<std::string, size_t> sizes = {
      {"BOOL", 1}, {"U8", 1},   {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"F8_E8M0", 1}, {"I16", 2}, {"U16", 2},
      {"F16", 2},  {"BF16", 2}, {"I32", 4}, {"U32", 4},     {"F32", 4},     {"F64", 8},     {"I64", 8}, {"U64", 8}};
  const auto found = sizes.find(dtype);
  return found == sizes.end() ? 0 : found->second;
}

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw Error(Status::kCorrupt, fmt::format("{}: {}", path, what));
}

[[noreturn]] void fail_tensor(const std::string& path, const std::string& tensor, const std::string& what) {
  throw Error(Status::kCorrupt, fmt::format("{}: tensor '{}': {}", path, printable(tensor), what));
}

// Bytes at the start of a file that say how long its header is.
constexpr size_t kStartBytes = 8 + sizeof kLfsMark;

// Of the header's text, after the checks that need no JSON. `start` holds the first kStartBytes of the file's `bytes`,
// or all.
size_t header_length(const std::string& path, const std::byte* start, size_t bytes) {
  if (bytes == 0) {
    fail(path, "the file is empty");
  }
  const size_t mark = sizeof kLfsMark - 1;
  if (bytes >= mark && std::memcmp(start, kLfsMark, mark) == 0) {
    fail(path, "this is a Git-LFS pointer, not the file itself; fetch it with 'git lfs pull'");
  }
  if (bytes < 8) {
    fail(path, fmt::format("{} bytes are too few for a safetensors file", bytes));
  }
  uint64_t length = 0;
  for (size_t i = 0; i < 8; ++i) {
    length |= static_cast<uint64_t>(std::to_integer<unsigned>(start[i])) << (8 * i);
  }
  if (length > bytes - 8) {
    fail(path, fmt::format("the header claims {} bytes, but only {} follow (truncated, or not a safetensors file)",
                           length, bytes - 8));
  }
  if (length > kHeaderBytesMax) {
    fail(path, fmt::format("a header of {} bytes is over the limit of {}", length, kHeaderBytesMax));
  }
  return static_cast<size_t>(length);
}

uint64_t to_unsigned(const Json& value, const std::string& path, const std::string& tensor, const char* key) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) {
    fail_tensor(path, tensor, fmt::format("{} must hold integers of 0 or more", key));
  }
  return value.get<uint64_t>();
}

const Json& tensor_array(const Json& entry, const std::string& path, const std::string& tensor, const char* key) {
  const auto found = entry.find(key);
  if (found == entry.end() || !found->is_array()) {
    fail_tensor(path, tensor, fmt::format("no list '{}'", key));
  }
  return *found;
}

// One entry of the header; the end of its range is checked against the file here, its neighbours later. `data`: the
// values of all tensors, or null; they begin at `data_offset`.
StoredTensor parse_tensor(const std::string& path, const std::string& name, const Json& entry, const std::byte* data,
                          uint64_t data_offset, uint64_t data_bytes) {
  if (!entry.is_object()) {
    fail_tensor(path, name, "the header entry is not an object");
  }
  const auto dtype = entry.find("dtype");
  if (dtype == entry.end() || !dtype->is_string()) {
    fail_tensor(path, name, "no string 'dtype'");
  }
  StoredTensor tensor;
  tensor.name = name;
  tensor.dtype = dtype->get<std::string>();

  uint64_t elements = 1;
  bool overflow = false;
  for (const Json& dim : tensor_array(entry, path, name, "shape")) {
    const uint64_t size = to_unsigned(dim, path, name, "shape");
    tensor.shape.push_back(static_cast<int64_t>(size));
    overflow = __builtin_mul_overflow(elements, size, &elements) || overflow;
  }
  const Json& offsets = tensor_array(entry, path, name, "data_offsets");
  if (offsets.size() != 2) {
    fail_tensor(path, name, "data_offsets must hold two numbers");
  }
  const uint64_t begin = to_unsigned(offsets[0], path, name, "data_offsets");
  const uint64_t end = to_unsigned(offsets[1], path, name, "data_offsets");
  if (begin > end || end > data_bytes) {
    fail_tensor(path, name,
                fmt::format("data_offsets [{}, {}) lie outside the file's {} bytes of data", begin, end, data_bytes));
  }
  const uint64_t size = stored_dtype_bytes(tensor.dtype);
  uint64_t expected = 0;
  // A zero-length dimension makes the product 0 whatever the others are, so an overflow before it does not count.
  const bool has_zero = std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end();
  if (has_zero) {
    elements = 0;
  }
  if ((overflow && !has_zero) || __builtin_mul_overflow(elements, std::max<uint64_t>(size, 1), &expected) ||
      elements > static_cast<uint64_t>(INT64_MAX)) {
    fail_tensor(path, name, fmt::format("shape {} is too large", tensor.shape_text()));
  }
  if (size != 0 && expected != end - begin) {
    fail_tensor(path, name,
                fmt::format("{} {} needs {} bytes, data_offsets [{}, {}) hold {}", tensor.dtype, tensor.shape_text(),
                            expected, begin, end, end - begin));
  }
  tensor.data = data == nullptr ? nullptr : data + begin;
  tensor.offset = data_offset + begin;
  tensor.bytes = static_cast<size_t>(end - begin);
  return tensor;
}

void check_metadata(const std::string& path, const Json& metadata) {
  if (!metadata.is_object()) {
    fail(path, "'__metadata__' is not an object");
  }
  for (const auto& item : metadata.items()) {
    if (!item.value().is_string()) {
      fail(path, fmt::format("'__metadata__' key '{}' is not a string", printable(item.key())));
    }
  }
}

// Ranges must cover the data exactly: an overlap or a hole is a broken or a forged file.
void check_ranges(const std::string& path, const std::vector<StoredTensor>& tensors, uint64_t data_offset,
                  size_t data_bytes) {
  std::vector<const StoredTensor*> order;
  order.reserve(tensors.size());
  for (const StoredTensor& tensor : tensors) {
    order.push_back(&tensor);
  }
  std::sort(order.begin(), order.end(), [](const StoredTensor* a, const StoredTensor* b) {
    return a->offset != b->offset ? a->offset < b->offset : a->bytes < b->bytes;
  });
  size_t end = 0;
  const StoredTensor* previous = nullptr;
  for (const StoredTensor* tensor : order) {
    const auto begin = static_cast<size_t>(tensor->offset - data_offset);
    if (begin < end) {
      fail_tensor(path, tensor->name, fmt::format("its data overlap those of '{}'", printable(previous->name)));
    }
    if (begin > end) {
      fail_tensor(path, tensor->name, fmt::format("{} bytes before its data belong to no tensor", begin - end));
    }
    end = begin + tensor->bytes;
    previous = tensor;
  }
  if (end != data_bytes) {
    fail(path, fmt::format("{} bytes at the end belong to no tensor", data_bytes - end));
  }
}

}  // namespace

int64_t StoredTensor::elements() const {
  int64_t count = 1;
  for (const int64_t dim : shape) {
    if (dim == 0) {
      return 0;
    }
  }
  for (const int64_t dim : shape) {
    count *= dim;
  }
  return count;
}

std::string StoredTensor::shape_text() const {
  constexpr size_t kShown = 8;
  std::string text = "[";
  for (size_t i = 0; i < shape.size() && i < kShown; ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  }
  return text + (shape.size() > kShown ? ", ...]" : "]");
}

struct SafetensorsFile::Impl {
  std::string path;
  std::unique_ptr<MappedFile> file;  // null over borrowed memory
  const std::byte* data = nullptr;
  size_t bytes = 0;
  std::vector<StoredTensor> tensors;
  std::unordered_map<std::string, size_t> index;

  void parse(const std::string& text) {
    const Json header = parse_json(text, path + " (header)", kHeaderBytesMax);
    if (!header.is_object()) {
      fail(path, "the header is not a JSON object");
    }
    const size_t value_offset = 8 + text.size();
    const std::byte* values = data == nullptr ? nullptr : data + value_offset;
    const size_t value_bytes = bytes - value_offset;
    tensors.reserve(header.size());
    for (const auto& [name, entry] : header.get_ref<const Json::object_t&>()) {
      if (name == "__metadata__") {
        check_metadata(path, entry);
        continue;
      }
      index.emplace(name, tensors.size());
      tensors.push_back(parse_tensor(path, name, entry, values, value_offset, value_bytes));
    }
    check_ranges(path, tensors, value_offset, value_bytes);
  }
};

SafetensorsFile::SafetensorsFile() : impl_(std::make_unique<Impl>()) {}
SafetensorsFile::~SafetensorsFile() = default;

std::unique_ptr<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  auto file = std::make_unique<MappedFile>(path);
  const ByteSource mapped(file->data(), file->bytes(), path);
  auto result = from_header(read_header(mapped), mapped);
  result->impl_->file = std::move(file);
  return result;
}

std::string SafetensorsFile::read_header(const ByteSource& source) {
  std::byte scratch[kStartBytes];
  const std::byte* start = source.read(0, std::min(kStartBytes, source.bytes()), scratch);
  std::string header(header_length(source.label(), start, source.bytes()), '\0');
  auto* text = reinterpret_cast<std::byte*>(header.data());
  const std::byte* read = source.read(8, header.size(), text);
  if (read != text) {
    std::memcpy(text, read, header.size());
  }
  return header;
}

std::unique_ptr<SafetensorsFile> SafetensorsFile::from_header(const std::string& header, const ByteSource& source) {
  std::unique_ptr<SafetensorsFile> result(new SafetensorsFile);
  Impl& impl = *result->impl_;
  impl.path = source.label();
  impl.data = source.is_memory() ? source.read(0, source.bytes(), nullptr) : nullptr;
  impl.bytes = source.bytes();
  impl.parse(header);
  return result;
}

const std::string& SafetensorsFile::path() const {
  return impl_->path;
}
const std::vector<StoredTensor>& SafetensorsFile::tensors() const {
  return impl_->tensors;
}
const std::byte* SafetensorsFile::data() const {
  return impl_->data;
}
size_t SafetensorsFile::bytes() const {
  return impl_->bytes;
}

const StoredTensor* SafetensorsFile::find(const std::string& name) const {
  const auto found = impl_->index.find(name);
  return found == impl_->index.end() ? nullptr : &impl_->tensors[found->second];
}

}  // namespace moelora
