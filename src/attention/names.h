// SPDX-License-Identifier: Apache-2.0
// Names of the enumerators of a spec, for explain() and error messages.
#pragma once

#include <string_view>

#include "fovea/attention_spec.h"
#include "fovea/kv_cache.h"

namespace fovea {

std::string_view name_of(AttentionKind kind);
std::string_view name_of(AttentionScope scope);
std::string_view name_of(MaskKind mask);
std::string_view name_of(KvLayout layout);
std::string_view name_of(KvScale scale);
inline std::string_view name_of(DType dtype) { return dtype_name(dtype); }

}  // namespace fovea
