// SPDX-License-Identifier: Apache-2.0
// Runs a program and records its output, its exit code and its memory.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace fovea::test {

struct ProgramResult {
  int exit_code = -1;  // 128 + signal if it was killed
  std::string out, err;
  size_t peak_rss_bytes = 0;
};

ProgramResult run_program(const std::vector<std::string>& command);

// Sends `signal` when the program handles it and has printed `bytes` to stdout.
ProgramResult interrupt_program(const std::vector<std::string>& command, int signal, size_t bytes);

}  // namespace fovea::test
