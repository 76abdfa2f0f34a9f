// SPDX-License-Identifier: Apache-2.0
#include "runtime/engine/timeline.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>

#include <fmt/format.h>

#include "kernels/base/error.h"

namespace moelora {
namespace {

constexpr size_t kFlushBytes = size_t{1} << 16;
constexpr int kStepTrack = 1, kUploadTrack = 2;

// A name of a stranger as the inside of a JSON string; it is valid UTF-8 (checked where adapters are named) or bytes
// that are passed on.
std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      out += c;
    }
  }
  return out;
}

class TraceWriter {
 public:
  TraceWriter(const std::string& path, const std::unordered_map<uint64_t, std::string>& names)
      : path_(path), names_(names), file_(path, std::ios::binary | std::ios::trunc) {
    if (!file_) {
      throw Error(Status::kIo, fmt::format("cannot write {}: {}", path_, std::strerror(errno)));
    }
    text_ = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
    print(R"({{"ph":"M","pid":1,"name":"process_name","args":{{"name":"moelora engine"}}}})");
    track(kStepTrack, "steps");
    track(kUploadTrack, "uploads of adapters");
  }

  void write(const TimelineEvent& event) {
    std::visit([this](const auto& kind) { add(kind); }, event);
    if (text_.size() > kFlushBytes) {
      flush();
    }
  }

  void finish(uint64_t num_dropped) {
    text_ += fmt::format("\n],\"otherData\":{{\"dropped_events\":{}}}}}\n", num_dropped);
    flush();
    file_.close();
    if (!file_) {
      throw Error(Status::kIo, fmt::format("cannot write {}: {}", path_, std::strerror(errno)));
    }
  }

 private:
  template <class... Values>
  void print(fmt::format_string<const Values&...> format, const Values&... values) {
    text_ += first_ ? "" : ",\n";
    first_ = false;
    fmt::format_to(std::back_inserter(text_), format, values...);
  }

  void track(int id, const char* name) {
    print(R"({{"ph":"M","pid":1,"tid":{},"name":"thread_name","args":{{"name":"{}"}}}})", id, name);
  }

  [[nodiscard]] std::string name_of(uint64_t adapter) const {
    if (adapter == 0) {
      return "base";
    }
    const auto found = names_.find(adapter);
    return found == names_.end() ? fmt::format("adapter {}", adapter) : escaped(found->second);
  }

  void add(const StepEvent& step) {
    print(R"({{"ph":"X","pid":1,"tid":{},"name":"{}","ts":{:.3f},"dur":{:.3f},"args":{{"step":{},"rows":{},)"
          R"("prefill_rows":{},"sequences":{},"adapters":{},"loads":{}}}}})",
          kStepTrack, step.prefill_rows > 0 ? "prefill" : "decode", step.start_ms * 1e3,
          (step.end_ms - step.start_ms) * 1e3, step.index, step.rows, step.prefill_rows, step.sequences, step.adapters,
          step.loads);
    const double at = step.end_ms * 1e3;
    print(R"({{"ph":"C","pid":1,"name":"requests","ts":{:.3f},"args":{{"running":{},"waiting":{}}}}})", at,
          step.running, step.waiting);
    print(R"({{"ph":"C","pid":1,"name":"pages","ts":{:.3f},"args":{{"kv":{},"adapters":{},"free":{}}}}})", at,
          step.pages_kv, step.pages_adapter, step.pages_free);
  }

  void add(const UploadEvent& upload) {
    print(R"({{"ph":"X","pid":1,"tid":{},"name":"{}","ts":{:.3f},"dur":{:.3f},"args":{{"bytes":{}}}}})", kUploadTrack,
          name_of(upload.adapter), upload.start_ms * 1e3, (upload.end_ms - upload.start_ms) * 1e3, upload.bytes);
  }

  void phase(const char* name, double begin, double end, uint64_t id) {
    if (begin > 0 && end >= begin) {
      print(R"({{"ph":"b","cat":"request","pid":1,"id":{},"name":"{}","ts":{:.3f}}})", id, name, begin * 1e3);
      print(R"({{"ph":"e","cat":"request","pid":1,"id":{},"name":"{}","ts":{:.3f}}})", id, name, end * 1e3);
    }
  }

  void add(const RequestEvent& request) {
    const uint64_t id = ++num_requests_;
    const std::string name = name_of(request.adapter);
    const double first = request.first_token_ms > 0 ? request.first_token_ms : request.end_ms;
    print(R"({{"ph":"b","cat":"request","pid":1,"id":{},"name":"{}","ts":{:.3f},"args":{{"prompt_tokens":{},)"
          R"("output_tokens":{},"finish":{}}}}})",
          id, name, request.submitted_ms * 1e3, request.prompt_tokens, request.output_tokens, request.finish);
    phase("queued", request.submitted_ms, request.started_ms > 0 ? request.started_ms : request.end_ms, id);
    phase("prefill", request.started_ms, first, id);
    phase("decode", request.first_token_ms, request.end_ms, id);
    print(R"({{"ph":"e","cat":"request","pid":1,"id":{},"name":"{}","ts":{:.3f}}})", id, name, request.end_ms * 1e3);
  }

  void flush() {
    file_.write(text_.data(), static_cast<std::streamsize>(text_.size()));
    if (!file_) {
      throw Error(Status::kIo, fmt::format("cannot write {}: {}", path_, std::strerror(errno)));
    }
    text_.clear();
  }

  const std::string& path_;
  const std::unordered_map<uint64_t, std::string>& names_;
  std::ofstream file_;
  std::string text_;
  bool first_ = true;
  uint64_t num_requests_ = 0;
};

}  // namespace

void write_timeline(const std::string& path, const std::vector<TimelineEvent>& events, uint64_t num_dropped,
                    const std::unordered_map<uint64_t, std::string>& names) {
  TraceWriter writer(path, names);
  for (const TimelineEvent& event : events) {
    writer.write(event);
  }
  writer.finish(num_dropped);
}

}  // namespace moelora
