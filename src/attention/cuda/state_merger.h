// SPDX-License-Identifier: Apache-2.0
// Merging attention states on a GPU.
#pragma once

#include <memory>

#include "fovea/device.h"
#include "fovea/merge_states.h"

namespace fovea {

// Throws Error{unsupported} for shapes that the kernel does not serve.
std::unique_ptr<StateMerger> make_cuda_merger(const StateShape& shape, Device device);

}  // namespace fovea
