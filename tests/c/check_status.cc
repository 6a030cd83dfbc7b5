// SPDX-License-Identifier: Apache-2.0
#include "c/check_status.h"

#include "fovea/error.h"

namespace fovea::test {
namespace {

constexpr ErrorCode kCodes[] = {ErrorCode::invalid_argument, ErrorCode::unsupported,
                                ErrorCode::out_of_memory,    ErrorCode::workspace_too_small,
                                ErrorCode::corrupt_file,     ErrorCode::io,
                                ErrorCode::device_failure};

}  // namespace

void check_status(fovea_status status) {
  if (status == FOVEA_OK) return;
  const bool known = status >= FOVEA_INVALID_ARGUMENT && status <= FOVEA_DEVICE_FAILURE;
  throw Error(known ? kCodes[status - 1] : ErrorCode::device_failure, fovea_last_error());
}

}  // namespace fovea::test
