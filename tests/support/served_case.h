// SPDX-License-Identifier: Apache-2.0
// The parameter of tests that run over every backend and every case of a table that it serves.
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

// Backend by backend; none without the device to test on.
std::vector<ServedCase> served_cases(const std::vector<AttentionCase>& cases);

// "flash_decode", the name of such a test.
std::string served_case_name(const ::testing::TestParamInfo<ServedCase>& info);

}  // namespace fovea::test
