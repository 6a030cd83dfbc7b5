// SPDX-License-Identifier: Apache-2.0
// The number of cores that this process may keep busy.
#pragma once

#include <string>

namespace fovea {

// Returns the number of processors in the scheduler's affinity mask, or fewer if the CPU quota of a
// control group (version 1 or 2) allows less time. Part of a core counts as a whole one. The result
// is at least 1. Tests pass a folder in place of "/" as `root`.
int available_cores(const std::string& root = "");

}  // namespace fovea
