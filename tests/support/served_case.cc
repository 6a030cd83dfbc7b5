// SPDX-License-Identifier: Apache-2.0
#include "support/served_case.h"

#include "support/run_backend.h"
#include "support/test_device.h"

namespace fovea::test {

void PrintTo(const ServedCase& served, std::ostream* to) {
  *to << served.entry.name << " on " << served.test.name;
}

std::vector<ServedCase> served_cases(const std::vector<AttentionCase>& cases) {
  std::vector<ServedCase> served;
  if (!why_no_test_device().empty()) return served;
  const BackendRegistry registry = BackendRegistry::builtin();
  for (const BackendEntry& entry : registry.entries()) {
    for (const AttentionCase& test : cases) {
      if (entry.reject(request_of(test)).empty()) served.push_back({entry, test});
    }
  }
  return served;
}

std::string served_case_name(const ::testing::TestParamInfo<ServedCase>& info) {
  return info.param.entry.name + "_" + info.param.test.name;
}

}  // namespace fovea::test
