// SPDX-License-Identifier: Apache-2.0
#include "engine/available_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <string_view>

#include "core/cgroup.h"
#include "core/check.h"

namespace fovea {
namespace {

constexpr size_t kUnlimited = std::numeric_limits<size_t>::max();

// Returns the number that follows `name` in a file of lines "name  number ...".
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

// Returns nullopt if the file is missing or contains "max".
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

constexpr CgroupFiles kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes",
                                "total_inactive_file"};
constexpr CgroupFiles kVersion2{"memory.max", "memory.current", "inactive_file"};

}  // namespace

size_t available_memory(const std::string& root) {
  const std::string path = root + "/proc/meminfo";
  const std::optional<size_t> kilobytes = read_entry(path, "MemAvailable:");
  if (!kilobytes)
    fail(ErrorCode::io, "{} has no MemAvailable, so the free memory is unknown", path);
  size_t available = *kilobytes * 1024;
  for (const CgroupFolder& folder : cgroup_folders("memory", root)) {
    const CgroupFiles& files = folder.version == 1 ? kVersion1 : kVersion2;
    available = std::min(available, cgroup_rest(folder.path, files));
  }
  return available;
}

}  // namespace fovea
