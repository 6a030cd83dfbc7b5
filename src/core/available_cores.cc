// SPDX-License-Identifier: Apache-2.0
#include "core/available_cores.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <thread>

#include "core/cgroup.h"

namespace fovea {
namespace {

int allowed_processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  const unsigned cores = std::thread::hardware_concurrency();
  return cores ? static_cast<int>(cores) : 1;
}

// Microseconds of processor time in each period. Without a quota, version 2 says "max", which is no
// number, and version 1 says -1.
struct Quota {
  int64_t quota = 0, period = 0;
};

std::optional<Quota> read_quota(const CgroupFolder& folder) {
  Quota read;
  if (folder.version == 2) {
    if (!(std::ifstream(folder.path + "/cpu.max") >> read.quota >> read.period)) return {};
  } else if (!(std::ifstream(folder.path + "/cpu.cfs_quota_us") >> read.quota) ||
             !(std::ifstream(folder.path + "/cpu.cfs_period_us") >> read.period)) {
    return {};
  }
  if (read.quota <= 0 || read.period <= 0) return {};
  return read;
}

}  // namespace

int available_cores(const std::string& root) {
  int64_t cores = allowed_processors();
  for (const CgroupFolder& folder : cgroup_folders("cpu", root)) {
    const std::optional<Quota> read = read_quota(folder);
    if (!read) continue;
    const bool part = read->quota % read->period != 0;
    cores = std::min(cores, read->quota / read->period + part);
  }
  return static_cast<int>(std::max<int64_t>(cores, 1));
}

}  // namespace fovea
