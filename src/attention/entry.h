// SPDX-License-Identifier: Apache-2.0
// Checks that every row of the backend table shares.
#pragma once

#include "fovea/select_backend.h"

namespace fovea {

// Returns `entry` with workspace_bytes and create that throw Error{unsupported}, naming the backend
// and the first reason, for requests that `reject` refuses. create cannot check limits, which
// selection has checked before.
BackendEntry guarded(BackendEntry entry);

}  // namespace fovea
