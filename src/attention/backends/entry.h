// SPDX-License-Identifier: Apache-2.0
// What every row of the backend table does with a request.
#pragma once

#include <span>
#include <string_view>

#include "fovea/select_backend.h"

namespace fovea {

// What a context asks for; selection has looked at the limits before.
BackendRequest request_of(const BackendContext& context);

// Error{unsupported} naming the backend and the first reason, if there is one.
void refuse(std::string_view name, std::span<const Reason> reasons);

}  // namespace fovea
