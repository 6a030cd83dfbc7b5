// SPDX-License-Identifier: Apache-2.0
#include "fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    fovea::fuzz::read_json_schema({data, size});
  } catch (const fovea::Error&) {
    return 0;
  }
  return 0;
}
