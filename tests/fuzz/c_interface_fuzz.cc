// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstdlib>

#include "c/fuzz_calls.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fovea::test::FuzzCount count;
  const std::string violation = fovea::test::fuzz_calls({data, size}, count);
  if (violation.empty()) return 0;
  std::fprintf(stderr, "%s\n", violation.c_str());
  std::abort();
}
