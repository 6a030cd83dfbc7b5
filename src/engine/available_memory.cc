// SPDX-License-Identifier: Apache-2.0
#include "engine/available_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <string_view>

#include "core/check.h"

namespace fovea {
namespace {

constexpr size_t kUnlimited = std::numeric_limits<size_t>::max();

// The number behind `name` in a file of lines "name  number ...".
std::optional<size_t> read_entry(const std::string& path, std::string_view name) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    size_t value = 0;
    if (word == name && file >> value) return value;
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return std::nullopt;
}

// nullopt when the file is missing or says "max".
std::optional<size_t> read_number(const std::string& path) {
  std::ifstream file(path);
  size_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

struct CgroupFiles {
  const char* limit;
  const char* usage;
  const char* droppable;  // entry of memory.stat
};

size_t cgroup_rest(const std::string& folder, const CgroupFiles& files) {
  const std::optional<size_t> limit = read_number(folder + "/" + files.limit);
  const std::optional<size_t> usage = read_number(folder + "/" + files.usage);
  if (!limit || !usage) return kUnlimited;
  const size_t droppable = read_entry(folder + "/memory.stat", files.droppable).value_or(0);
  const size_t used = *usage - std::min(*usage, droppable);
  return *limit - std::min(*limit, used);
}

// The least that this process's group and the groups above it leave. A container often sees its own
// group as the root.
size_t cgroup_rest_of_path(const std::string& mount, std::string path, const CgroupFiles& files) {
  size_t rest = cgroup_rest(mount, files);
  while (!path.empty() && path != "/") {
    rest = std::min(rest, cgroup_rest(mount + path, files));
    path.resize(path.rfind('/'));
  }
  return rest;
}

size_t cgroup_available(const std::string& root) {
  size_t rest = kUnlimited;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    // hierarchy:controllers:path; v2 is "0::path".
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos || line.compare(second + 1, 1, "/") != 0) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      const CgroupFiles v2{"memory.max", "memory.current", "inactive_file"};
      rest = std::min(rest, cgroup_rest_of_path(root + "/sys/fs/cgroup", path, v2));
    } else if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      const CgroupFiles v1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};
      rest = std::min(rest, cgroup_rest_of_path(root + "/sys/fs/cgroup/memory", path, v1));
    }
  }
  return rest;
}

}  // namespace

size_t available_memory(const std::string& root) {
  const std::string path = root + "/proc/meminfo";
  const std::optional<size_t> kilobytes = read_entry(path, "MemAvailable:");
  if (!kilobytes) fail(ErrorCode::io, "{} has no MemAvailable: cannot tell the free memory", path);
  return std::min(*kilobytes * 1024, cgroup_available(root));
}

}  // namespace fovea
