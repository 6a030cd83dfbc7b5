// SPDX-License-Identifier: Apache-2.0
// Finds the control groups that limit this process, which container runtimes set up.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fovea {

struct CgroupFolder {
  std::string path;  // folder of the controller's files
  int version = 2;   // 1 or 2; file names differ between the versions
};

// Returns the folder of this process's group for `controller` ("memory" or "cpu") and the folders
// of all its parent groups, for each mounted version. A folder may lack some files. Tests pass a
// folder in place of "/" as `root`.
std::vector<CgroupFolder> cgroup_folders(std::string_view controller, const std::string& root = "");

}  // namespace fovea
