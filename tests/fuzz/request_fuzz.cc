// SPDX-License-Identifier: Apache-2.0
#include "fuzz/request_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fovea::fuzz::read_request({data, size});
  return 0;
}
