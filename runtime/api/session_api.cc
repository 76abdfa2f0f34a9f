// SPDX-License-Identifier: Apache-2.0
// moelora.h, group "sessions".
#include "runtime/api/boundary.h"
#include "runtime/api/handles.h"

using namespace moelora;
using namespace moelora::api;

namespace {

moelora_session add_session(EngineObject& object, std::shared_ptr<Session> session, moelora_adapter adapter) {
  auto entry = std::make_shared<SessionObject>();
  entry->session = std::move(session);
  entry->adapter = adapter;
  try {
    return object.sessions.add(entry);
  } catch (...) {
    object.engine->close_session(entry->session);
    throw;
  }
}

}  // namespace

moelora_status moelora_session_create(moelora_engine* engine, moelora_adapter adapter, float scale,
                                      moelora_session* out, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    required(out, "out");
    auto session = call->engine->create_session(call->adapter_or_base(adapter), finite_scale(scale));
    *out = add_session(*call, std::move(session), adapter);
    return Status::kOk;
  });
}

moelora_status moelora_session_fork(moelora_engine* engine, moelora_session session, moelora_session* out,
                                    moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    required(out, "out");
    const auto source = call->sessions.find(session);
    *out = add_session(*call, call->engine->fork_session(source->session), source->adapter);
    return Status::kOk;
  });
}

moelora_status moelora_session_rollback(moelora_engine* engine, moelora_session session, int64_t num_tokens,
                                        moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    call->engine->rollback_session(call->sessions.find(session)->session, num_tokens);
    return Status::kOk;
  });
}

moelora_status moelora_session_info_get(moelora_engine* engine, moelora_session session, moelora_session_info* info,
                                        moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    check_struct(info, "info");
    const auto found = call->sessions.find(session);
    const Engine::SessionInfo state = call->engine->session_info(found->session);
    moelora_session_info out = {};
    out.num_blocks = state.num_blocks;
    out.num_tokens = state.num_tokens;
    out.num_computed = state.num_computed;
    out.adapter = found->adapter;
    out.scale = found->session->scale;
    out.resident = state.resident ? 1 : 0;
    out.busy = state.busy ? 1 : 0;
    write_struct(info, out);
    return Status::kOk;
  });
}

moelora_status moelora_session_close(moelora_engine* engine, moelora_session session, moelora_error* err) {
  return guard(err, [&] {
    const EngineCall call(engine);
    if (session == 0) {
      return Status::kOk;
    }
    call->engine->close_session(call->sessions.remove(session)->session);
    return Status::kOk;
  });
}
