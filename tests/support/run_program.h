// SPDX-License-Identifier: Apache-2.0
// Runs a program and keeps what it printed, how it ended and how much memory it took.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace fovea::test {

struct ProgramResult {
  int exit_code = -1;  // 128 + signal when it was killed
  std::string out, err;
  size_t peak_rss_bytes = 0;
};

ProgramResult run_program(const std::vector<std::string>& command);

}  // namespace fovea::test
