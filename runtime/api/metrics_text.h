// SPDX-License-Identifier: Apache-2.0
// The counters of an engine as Prometheus reads them: text exposition format, version 0.0.4.
#pragma once

#include <string>

#include "runtime/api/handles.h"

namespace moelora::api {

std::string metrics_text(EngineObject& object);

}  // namespace moelora::api
