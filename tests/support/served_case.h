// SPDX-License-Identifier: Apache-2.0
// The parameter of tests over every backend and every case that it serves.
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "fovea/select_backend.h"
#include "support/attention_case.h"

namespace fovea::test {

struct ServedCase {
  BackendEntry entry;
  AttentionCase test;
};

void PrintTo(const ServedCase& served, std::ostream* to);

// Returns the pairs, backend by backend; none without the test device.
std::vector<ServedCase> served_cases(const std::vector<AttentionCase>& cases);

// Returns the name of such a test, like "flash_decode".
std::string served_case_name(const ::testing::TestParamInfo<ServedCase>& info);

}  // namespace fovea::test
