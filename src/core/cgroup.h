// SPDX-License-Identifier: Apache-2.0
// Which control groups limit this process, as a container's runtime sets them up.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fovea {

struct CgroupFolder {
  std::string path;  // holds the controller's files
  int version = 2;   // 1 or 2: the versions name their files differently
};

// The folder of this process's group for `controller` ("memory", "cpu"), and those of every group
// above it, in each version that is mounted. A file in them may be missing. `root` stands in for
// "/" in tests.
std::vector<CgroupFolder> cgroup_folders(std::string_view controller, const std::string& root = "");

}  // namespace fovea
