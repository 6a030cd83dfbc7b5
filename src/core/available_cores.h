// SPDX-License-Identifier: Apache-2.0
// How many cores this process may keep busy.
#pragma once

#include <string>

namespace fovea {

// The processors that the scheduler's affinity mask allows, or fewer where the CPU quota of a
// control group (version 1 or 2) allows less time; a part of a core counts as a whole one. At
// least 1. `root` stands in for "/" in tests.
int available_cores(const std::string& root = "");

}  // namespace fovea
