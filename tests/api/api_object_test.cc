// SPDX-License-Identifier: Apache-2.0
// Adapters and sessions through the public API.
#include <cmath>
#include <fstream>
#include <iterator>

#include "tests/api/host.h"

using namespace moelora_host;

namespace {

const std::vector<int32_t> kPrompt = {52, 20, 29, 93, 163, 281, 246};

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

moelora_adapter_info info_of(const Host& host, moelora_adapter adapter) {
  moelora_adapter_info info;
  moelora_adapter_info_init(&info);
  REQUIRE(moelora_adapter_info_get(host.engine, adapter, &info, nullptr) == MOELORA_OK);
  return info;
}

std::vector<int32_t> answer_in(const Host& host, moelora_session session, const std::vector<int32_t>& prompt,
                               int32_t max_tokens) {
  const moelora_request request = host.build(prompt, max_tokens);
  REQUIRE(moelora_request_set_session(host.engine, request, session, nullptr) == MOELORA_OK);
  Err err;
  if (moelora_request_submit(host.engine, request, err) != MOELORA_OK) {
    FAIL(err.message());
  }
  std::vector<int32_t> tokens = host.read_all(request);
  REQUIRE(moelora_request_close(host.engine, request, nullptr) == MOELORA_OK);
  return tokens;
}

moelora_session_info info_of_session(const Host& host, moelora_session session) {
  moelora_session_info info;
  moelora_session_info_init(&info);
  REQUIRE(moelora_session_info_get(host.engine, session, &info, nullptr) == MOELORA_OK);
  return info;
}

}  // namespace

TEST_CASE("adapters: names, identity, info") {
  const Host host;
  Err err;
  const moelora_adapter attn = host.load("attn");
  const std::string dir = adapter_dir("attn");
  moelora_adapter again = 0;
  CHECK(moelora_adapter_load_dir(host.engine, "attn", 4, dir.data(), dir.size(), 0, &again, err) == MOELORA_E_EXISTS);
  CHECK(err.names("attn"));
  CHECK(moelora_adapter_load_dir(host.engine, "\xff", 1, dir.data(), dir.size(), 0, &again, err) == MOELORA_E_INVALID);
  CHECK(err.names("UTF-8"));
  CHECK(moelora_adapter_load_dir(host.engine, "", 0, dir.data(), dir.size(), 0, &again, err) == MOELORA_E_INVALID);
  CHECK(moelora_adapter_load_dir(host.engine, "x", 1, "/no/such", MOELORA_STRLEN, 0, &again, err) == MOELORA_E_IO);
  CHECK(moelora_adapter_load_dir(host.engine, "x", 1, dir.data(), dir.size(), 1024, &again, err) == MOELORA_E_INVALID);
  CHECK(moelora_adapter_load_dir(host.engine, "x", 1, dir.data(), dir.size(), 4 | 8, &again, err) == MOELORA_E_INVALID);
  CHECK(moelora_adapter_load_mem(host.engine, "x", 1, "{}", 2, "", 0, MOELORA_ADAPTER_LAZY, &again, err) ==
        MOELORA_E_INVALID);
  CHECK(err.names("MOELORA_ADAPTER_LAZY"));
  CHECK(again == 0);
  moelora_adapter lazy = 0;
  REQUIRE(moelora_adapter_load_dir(host.engine, "lazy", 4, dir.data(), dir.size(), MOELORA_ADAPTER_LAZY, &lazy, err) ==
          MOELORA_OK);
  CHECK(info_of(host, lazy).fingerprint == 0);
  CHECK(info_of(host, lazy).in_host_memory == 0);
  CHECK(info_of(host, lazy).targets == info_of(host, attn).targets);
  CHECK(info_of(host, lazy).host_bytes == info_of(host, attn).host_bytes);
  CHECK(moelora_adapter_unload(host.engine, lazy, 0, nullptr) == MOELORA_OK);

  const moelora_adapter_info info = info_of(host, attn);
  const nlohmann::json config = nlohmann::json::parse(read_file(dir + "/adapter_config.json"));
  CHECK(info.rank == config.at("r").get<int>());
  CHECK(info.alpha == config.at("lora_alpha").get<float>());
  CHECK(info.scale == 1.0f);
  CHECK((info.targets & MOELORA_TARGET_Q) != 0);
  CHECK((info.targets & (MOELORA_TARGET_EXPERT_GATE | MOELORA_TARGET_ROUTER)) == 0);
  CHECK(info.num_layers == 2);
  CHECK(info.num_experts == 0);
  CHECK(info.tensors_matched > 0);
  CHECK(info.tensors_unmatched == 0);
  CHECK(info.file_bytes > 0);
  CHECK(info.read_ms > 0);
  CHECK(info.pack_ms > 0);
  CHECK(info.upload_ms == 0);
  moelora_adapter_info older = {};  // of the first release, which ended before the times
  older.struct_size = 96;
  older.upload_ms = older.read_ms = older.pack_ms = -7;
  REQUIRE(moelora_adapter_info_get(host.engine, attn, &older, err) == MOELORA_OK);
  CHECK(older.struct_size == 96);
  CHECK(older.fingerprint == info.fingerprint);
  CHECK(older.read_ms == -7);
  CHECK(older.upload_ms == -7);
  older.struct_size = 95;
  CHECK(moelora_adapter_info_get(host.engine, attn, &older, err) == MOELORA_E_STRUCT_SIZE);
  CHECK(info.host_bytes > 0);

  moelora_adapter found = 0;
  CHECK(moelora_adapter_find(host.engine, "attn", 4, &found, err) == MOELORA_OK);
  CHECK(found == attn);
  CHECK(moelora_adapter_find(host.engine, "nobody", 6, &found, err) == MOELORA_E_NOT_FOUND);
  CHECK(err.names("nobody"));
  char name[16];
  size_t n = 0;
  CHECK(moelora_adapter_name(host.engine, attn, nullptr, 0, &n, err) == MOELORA_MORE);
  CHECK(n == 4);
  CHECK(moelora_adapter_name(host.engine, attn, name, sizeof name, &n, err) == MOELORA_OK);
  CHECK(std::string(name, n) == "attn");

  // Another load of the same files under another name, from memory, is the same adapter in all but identity.
  const std::string weights = read_file(dir + "/adapter_model.safetensors");
  const std::string json = read_file(dir + "/adapter_config.json");
  moelora_adapter memory = 0;
  REQUIRE(moelora_adapter_load_mem(host.engine, "memory", MOELORA_STRLEN, json.data(), json.size(), weights.data(),
                                   weights.size(), 0, &memory, err) == MOELORA_OK);
  CHECK(memory != attn);
  CHECK(info_of(host, memory).fingerprint == info.fingerprint);
  CHECK(host.answer(kPrompt, 8, memory) == host.answer(kPrompt, 8, attn));
  CHECK(moelora_adapter_load_mem(host.engine, "cut", 3, json.data(), json.size(), weights.data(), weights.size() / 2, 0,
                                 &again, err) == MOELORA_E_CORRUPT);
  CHECK(moelora_adapter_load_mem(host.engine, "none", 4, json.data(), json.size(), nullptr, 0, 0, &again, err) < 0);

  moelora_adapter list[4];
  CHECK(moelora_adapter_list(host.engine, list, 1, &n, err) == MOELORA_MORE);
  CHECK(n == 2);
  REQUIRE(moelora_adapter_list(host.engine, list, 4, &n, err) == MOELORA_OK);
  CHECK(list[0] == attn);
  CHECK(list[1] == memory);

  moelora_adapter replaced = 0;
  REQUIRE(moelora_adapter_load_dir(host.engine, "attn", 4, dir.data(), dir.size(), MOELORA_ADAPTER_REPLACE, &replaced,
                                   err) == MOELORA_OK);
  CHECK(replaced != attn);
  CHECK(moelora_adapter_find(host.engine, "attn", 4, &found, err) == MOELORA_OK);
  CHECK(found == replaced);
  CHECK(host.answer(kPrompt, 4, attn) == host.answer(kPrompt, 4, replaced));
}

TEST_CASE("adapters: clone, scale, pins, prefetch, unload") {
  const Host host;
  Err err;
  const moelora_adapter attn = host.load("attn");
  const std::vector<int32_t> base = host.answer(kPrompt, 8);
  const std::vector<int32_t> adapted = host.answer(kPrompt, 8, attn);
  CHECK(base != adapted);
  CHECK(host.answer(kPrompt, 8, attn, 0.0f) == base);
  moelora_adapter half = 0, zero = 0;
  REQUIRE(moelora_adapter_clone(host.engine, attn, "half", 4, 0.5f, &half, err) == MOELORA_OK);
  REQUIRE(moelora_adapter_clone(host.engine, attn, "zero", 4, 0.0f, &zero, err) == MOELORA_OK);
  CHECK(moelora_adapter_clone(host.engine, attn, "half", 4, 0.5f, &zero, err) == MOELORA_E_EXISTS);
  CHECK(info_of(host, half).scale == 0.5f);
  CHECK(host.answer(kPrompt, 8, half) == host.answer(kPrompt, 8, attn, 0.5f));
  CHECK(host.answer(kPrompt, 8, half, 2.0f) == adapted);
  CHECK(host.answer(kPrompt, 8, zero) == base);

  CHECK(moelora_adapter_unpin(host.engine, attn, err) == MOELORA_E_INVALID);
  CHECK(moelora_adapter_pin(host.engine, attn, err) == MOELORA_OK);
  CHECK(moelora_adapter_pin(host.engine, attn, err) == MOELORA_OK);
  CHECK(info_of(host, attn).pins == 2);
  CHECK(moelora_adapter_unpin(host.engine, attn, err) == MOELORA_OK);
  CHECK(moelora_adapter_unpin(host.engine, attn, err) == MOELORA_OK);
  CHECK(moelora_adapter_unpin(host.engine, attn, err) == MOELORA_E_INVALID);

  CHECK(moelora_adapter_set_weight(host.engine, attn, 3.0, err) == MOELORA_OK);
  CHECK(moelora_adapter_set_weight(host.engine, 0, 0.5, err) == MOELORA_OK);  // the base
  for (const double weight : {0.0, -1.0, 1001.0, std::nan("")}) {
    CHECK(moelora_adapter_set_weight(host.engine, attn, weight, err) == MOELORA_E_INVALID);
  }
  CHECK(moelora_adapter_set_weight(host.engine, attn + 1000, 1.0, err) == MOELORA_E_HANDLE);

  const moelora_adapter fresh = host.load("experts");
  moelora_queue* queue = nullptr;
  REQUIRE(moelora_queue_create(&queue, err) == MOELORA_OK);
  REQUIRE(moelora_adapter_prefetch(host.engine, fresh, queue, 42, err) == MOELORA_OK);
  moelora_event event = {};
  size_t n = 0;
  REQUIRE(moelora_queue_wait(queue, 60000, &event, 1, &n, err) == MOELORA_OK);
  CHECK(event.kind == MOELORA_EVENT_ADAPTER_READY);
  CHECK(event.status == MOELORA_OK);
  CHECK(event.handle == fresh);
  CHECK(event.tag == 42);
  CHECK(info_of(host, fresh).resident == 1);
  moelora_queue_destroy(queue);
  CHECK(moelora_adapter_prefetch(host.engine, fresh, queue, 0, err) == MOELORA_E_HANDLE);
  CHECK(moelora_adapter_prefetch(host.engine, fresh, nullptr, 0, err) == MOELORA_OK);

  const moelora_request waiting = host.build(kPrompt, 4, fresh);
  CHECK(moelora_adapter_unload(host.engine, fresh, 2, err) == MOELORA_E_INVALID);
  CHECK(moelora_adapter_unload(host.engine, fresh, MOELORA_UNLOAD_IF_IDLE, err) == MOELORA_OK);
  CHECK(moelora_adapter_unload(host.engine, fresh, 0, err) == MOELORA_E_HANDLE);
  moelora_adapter_info info;
  moelora_adapter_info_init(&info);
  CHECK(moelora_adapter_info_get(host.engine, fresh, &info, err) == MOELORA_E_HANDLE);
  CHECK(moelora_request_submit(host.engine, waiting, err) == MOELORA_E_NOT_FOUND);
  CHECK(err.names("experts"));
  CHECK(host.load("experts") != fresh);
  CHECK(host.answer(kPrompt, 8, half) == host.answer(kPrompt, 8, attn, 0.5f));
}

TEST_CASE("unloading while requests run") {
  Options options;
  options.output_buffer_tokens = 2;  // keeps the request alive until it is read
  const Host host(options);
  Err err;
  const moelora_adapter attn = host.load("attn");
  const std::vector<int32_t> wanted = host.answer(kPrompt, 24, attn);
  const moelora_request request = host.submit(kPrompt, 24, attn);
  CHECK(moelora_adapter_unload(host.engine, attn, MOELORA_UNLOAD_IF_IDLE, err) == MOELORA_E_BUSY);
  CHECK(err.names("attn"));
  CHECK(info_of(host, attn).in_flight == 1);
  CHECK(moelora_adapter_unload(host.engine, attn, 0, err) == MOELORA_OK);
  CHECK(host.read_all(request) == wanted);
}

TEST_CASE("sessions continue, fork and roll back like the whole prompt at once") {
  const Host host;
  Err err;
  const moelora_adapter attn = host.load("attn");
  moelora_session session = 0;
  REQUIRE(moelora_session_create(host.engine, attn, 1.0f, &session, err) == MOELORA_OK);
  CHECK(info_of_session(host, session).adapter == attn);
  const std::vector<int32_t> first = answer_in(host, session, kPrompt, 5);
  CHECK(first == host.answer(kPrompt, 5, attn));
  std::vector<int32_t> whole = kPrompt;
  whole.insert(whole.end(), first.begin(), first.end());
  CHECK(info_of_session(host, session).num_tokens == static_cast<int64_t>(whole.size()));
  const std::vector<int32_t> more = {9, 8, 7};
  whole.insert(whole.end(), more.begin(), more.end());

  moelora_session fork = 0;
  REQUIRE(moelora_session_fork(host.engine, session, &fork, err) == MOELORA_OK);
  CHECK(answer_in(host, session, more, 6) == host.answer(whole, 6, attn));
  CHECK(answer_in(host, fork, more, 6) == host.answer(whole, 6, attn));
  CHECK(moelora_session_rollback(host.engine, fork, 1000, err) == MOELORA_E_INVALID);
  REQUIRE(moelora_session_rollback(host.engine, fork, 7, err) == MOELORA_OK);
  std::vector<int32_t> shorter = kPrompt;
  shorter.insert(shorter.end(), more.begin(), more.end());
  CHECK(answer_in(host, fork, more, 6) == host.answer(shorter, 6, attn));

  const moelora_request request = host.build(kPrompt, 2);
  REQUIRE(moelora_request_set_session(host.engine, request, session, err) == MOELORA_OK);
  CHECK(moelora_request_set_adapter(host.engine, request, attn, 1.0f, err) == MOELORA_E_INVALID);
  REQUIRE(moelora_request_set_session(host.engine, request, 0, err) == MOELORA_OK);
  REQUIRE(moelora_request_set_adapter(host.engine, request, attn, 1.0f, err) == MOELORA_OK);
  CHECK(moelora_request_set_session(host.engine, request, session, err) == MOELORA_E_INVALID);
  CHECK(moelora_request_set_session(host.engine, request, 4711, err) < 0);

  CHECK(moelora_session_close(host.engine, session, err) == MOELORA_OK);
  CHECK(moelora_session_close(host.engine, session, err) == MOELORA_E_HANDLE);
  CHECK(moelora_session_close(host.engine, 0, err) == MOELORA_OK);
  CHECK(moelora_session_fork(host.engine, session, &fork, err) == MOELORA_E_HANDLE);
}

TEST_CASE("one running request a session") {
  Options options;
  options.output_buffer_tokens = 2;
  const Host host(options);
  Err err;
  moelora_session session = 0, fork = 0;
  REQUIRE(moelora_session_create(host.engine, 0, 1.0f, &session, err) == MOELORA_OK);
  const moelora_request first = host.build(kPrompt, 40);
  const moelora_request second = host.build(kPrompt, 4);
  REQUIRE(moelora_request_set_session(host.engine, first, session, err) == MOELORA_OK);
  REQUIRE(moelora_request_set_session(host.engine, second, session, err) == MOELORA_OK);
  REQUIRE(moelora_request_submit(host.engine, first, err) == MOELORA_OK);
  CHECK(moelora_request_submit(host.engine, second, err) == MOELORA_E_BUSY);
  CHECK(info_of_session(host, session).busy == 1);
  CHECK(moelora_session_fork(host.engine, session, &fork, err) == MOELORA_E_BUSY);
  CHECK(moelora_session_rollback(host.engine, session, 0, err) == MOELORA_E_BUSY);
  REQUIRE(moelora_request_cancel(host.engine, first, MOELORA_CANCEL_DROP_TURN, err) == MOELORA_OK);
  (void)host.read_all(first);
  CHECK(info_of_session(host, session).num_tokens == 0);
  REQUIRE(moelora_request_submit(host.engine, second, err) == MOELORA_OK);
  CHECK(host.read_all(second) == host.answer(kPrompt, 4));
}
