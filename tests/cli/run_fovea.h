// SPDX-License-Identifier: Apache-2.0
// The command line tool as a user runs it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "support/run_program.h"

namespace fovea::test {

inline const std::string kModels = std::string(FOVEA_SOURCE_DIR) + "/testdata/models/";

inline ProgramResult fovea(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), FOVEA_CLI);
  return run_program(arguments);
}

// Expects a refusal: exit code 2, one line on stderr, nothing on stdout.
inline void expect_refused(const ProgramResult& result, const std::vector<std::string>& mentions) {
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_EQ(result.out, "");
  for (const std::string& text : mentions) {
    EXPECT_NE(result.err.find(text), std::string::npos) << "no '" << text << "' in: " << result.err;
  }
}

inline void expect_one_line(const ProgramResult& result) {
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
}

}  // namespace fovea::test
