// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/base/stream.h"

namespace moelora {

void delay_cuda(double milliseconds, Stream& stream);
// `event`: a cudaEvent_t.
void record_event(void* event, Stream& stream);

}  // namespace moelora
