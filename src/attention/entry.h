// SPDX-License-Identifier: Apache-2.0
// What every row of the backend table does with a request.
#pragma once

#include "fovea/select_backend.h"

namespace fovea {

// Lets workspace_bytes and create of `entry` refuse what its reject refuses, with
// Error{unsupported} naming the backend and the first reason. Selection has looked at the limits
// before create.
BackendEntry guarded(BackendEntry entry);

}  // namespace fovea
