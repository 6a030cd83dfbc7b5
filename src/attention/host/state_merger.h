// SPDX-License-Identifier: Apache-2.0
// Merging attention states on the CPU.
#pragma once

#include <memory>

#include "fovea/merge_states.h"
#include "fovea/thread_pool.h"

namespace fovea {

std::unique_ptr<StateMerger> make_host_merger(const StateShape& shape, ThreadPool& threads);

}  // namespace fovea
