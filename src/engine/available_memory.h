// SPDX-License-Identifier: Apache-2.0
// The amount of memory that this process may still allocate.
#pragma once

#include <cstddef>
#include <string>

namespace fovea {

// Returns bytes: MemAvailable of /proc/meminfo, or less if a memory cgroup (v2 or v1) allows less.
// Page cache that the kernel can drop counts as available. Tests pass a folder in place of "/" as
// `root`. Throws Error{io} if /proc/meminfo cannot be read.
size_t available_memory(const std::string& root = "");

}  // namespace fovea
