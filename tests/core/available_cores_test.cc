// SPDX-License-Identifier: Apache-2.0
// CPU quotas of containers, and the number of cores that they leave.
#include "core/available_cores.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "fovea/device.h"
#include "fovea/thread_pool.h"
#include "support/fake_root.h"

namespace fovea {
namespace {

const std::string kV2 = "0::/a/b\n", kMount = "sys/fs/cgroup/";
const std::string kV1 = "3:cpuset:/\n2:cpu,cpuacct:/docker/x\n0::/\n";
constexpr int kAll = 1 << 20;  // no quota

struct Case {
  std::string name, groups;
  std::map<std::string, std::string> files;
  int cores;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> cases = {
      {"no groups", "", {}, kAll},
      {"v2, none", kV2, {{"a/b/cpu.max", "max 100000\n"}}, kAll},
      {"v2, one core", kV2, {{"a/b/cpu.max", "100000 100000\n"}}, 1},
      {"v2, less than a core", kV2, {{"a/b/cpu.max", "1000 100000\n"}}, 1},
      {"v2, a core and a part", kV2, {{"a/b/cpu.max", "100001 100000\n"}}, 2},
      {"v2, another period", kV2, {{"a/b/cpu.max", "20000 10000\n"}}, 2},
      {"v2, of a group above", kV2, {{"a/b/cpu.max", "max 1\n"}, {"a/cpu.max", "5 5\n"}}, 1},
      {"v2, the least of all", kV2, {{"a/b/cpu.max", "9 1\n"}, {"a/cpu.max", "5 5\n"}}, 1},
      {"v2, its own group is the mount", kV2, {{"cpu.max", "7 7\n"}}, 1},
      {"v2, another group", kV2, {{"c/cpu.max", "7 7\n"}}, kAll},
      {"v2, no period", kV2, {{"cpu.max", "7\n"}}, kAll},
      {"v2, a period of 0", kV2, {{"cpu.max", "7 0\n"}}, kAll},
      {"v1, none",
       kV1,
       {{"cpu/docker/x/cpu.cfs_quota_us", "-1\n"}, {"cpu/docker/x/cpu.cfs_period_us", "100000\n"}},
       kAll},
      {"v1, one core",
       kV1,
       {{"cpu/docker/x/cpu.cfs_quota_us", "50000\n"},
        {"cpu/docker/x/cpu.cfs_period_us", "50000\n"}},
       1},
      {"v1, its own group is the mount",
       kV1,
       {{"cpu/cpu.cfs_quota_us", "30000\n"}, {"cpu/cpu.cfs_period_us", "50000\n"}},
       1},
      {"v1, no period", kV1, {{"cpu/cpu.cfs_quota_us", "30000\n"}}, kAll},
      {"v1, of another controller",
       "4:cpuset:/\n",
       {{"cpuset/cpu.cfs_quota_us", "1\n"}, {"cpuset/cpu.cfs_period_us", "1\n"}},
       kAll},
  };
  return cases;
}

TEST(AvailableCores, FollowsTheQuotasOfEveryGroup) {
  const int allowed = available_cores("/nonexistent");
  EXPECT_GE(allowed, 1);
  for (const Case& wanted : cases()) {
    SCOPED_TRACE(wanted.name);
    const test::FakeRoot root;
    root.write("proc/self/cgroup", wanted.groups);
    for (const auto& [file, text] : wanted.files) root.write(kMount + file, text);
    EXPECT_EQ(available_cores(root.path()), std::min(allowed, wanted.cores));
  }
}

TEST(AvailableCores, AreTheCoresOfTheDeviceAndTheThreadsOfAPool) {
  EXPECT_EQ(cpu_device().cores, available_cores());
  EXPECT_EQ(ThreadPool(0).size(), available_cores());
}

}  // namespace
}  // namespace fovea
