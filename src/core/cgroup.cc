// SPDX-License-Identifier: Apache-2.0
#include "core/cgroup.h"

#include <fstream>

namespace fovea {
namespace {

// A container often sees the mounted folder itself as its own group.
void add_path(std::vector<CgroupFolder>& folders, const std::string& mount, std::string path,
              int version) {
  folders.push_back({mount, version});
  while (!path.empty() && path != "/") {
    folders.push_back({mount + path, version});
    path.resize(path.rfind('/'));
  }
}

}  // namespace

std::vector<CgroupFolder> cgroup_folders(std::string_view controller, const std::string& root) {
  std::vector<CgroupFolder> folders;
  const std::string mounts = root + "/sys/fs/cgroup";
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    // A line is hierarchy:controllers:path; version 2 writes "0::path".
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos || line.compare(second + 1, 1, "/") != 0) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      add_path(folders, mounts, path, 2);
    } else if (("," + controllers + ",").find("," + std::string(controller) + ",") !=
               std::string::npos) {
      add_path(folders, mounts + "/" + std::string(controller), path, 1);
    }
  }
  return folders;
}

}  // namespace fovea
