// SPDX-License-Identifier: Apache-2.0
// How much memory this process may still take.
#pragma once

#include <cstddef>
#include <string>

namespace fovea {

// Bytes: MemAvailable of /proc/meminfo, or less where a memory cgroup (v2 or v1) leaves less; page
// cache that the kernel can drop counts as available. `root` stands in for "/" in tests. Throws
// Error{io} when /proc/meminfo cannot be read.
size_t available_memory(const std::string& root = "");

}  // namespace fovea
