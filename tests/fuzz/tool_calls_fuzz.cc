// SPDX-License-Identifier: Apache-2.0
#include "fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fovea::fuzz::read_tool_calls({data, size});
  return 0;
}
