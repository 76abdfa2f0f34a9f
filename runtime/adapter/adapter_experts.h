// SPDX-License-Identifier: Apache-2.0
// Adapters of 3-D expert parameters: PEFT's ParamWrapper (two 2-D matrices for all experts, either orientation) and
// the stacked 3-D exports. Both become one record for each expert and linear; gate and up share A.
#pragma once

#include <vector>

#include "runtime/adapter/adapter_pairs.h"

namespace moelora {

// Appends the records of all pairs whose target is none of kDense and kExpert. The orientation is decided for the
// adapter as a whole, so all pairs come at once. Throws Error{kAdapterMismatch} naming tensors, sizes and the option
// expert_orientation where that decides.
void append_expert_records(const std::vector<AdapterPair>& pairs, const LoadContext& context,
                           std::vector<AdapterRecord>& records);

}  // namespace moelora
