// SPDX-License-Identifier: Apache-2.0
// The only exception type of the library. Expected outcomes (a full pool, a rejected backend) are
// return values, not exceptions.
#pragma once

#include <stdexcept>
#include <string>

#include "fovea/api.h"

namespace FOVEA_API fovea {

enum class ErrorCode {
  invalid_argument,     // the caller passed something outside the documented limits
  unsupported,          // valid, but not available here; the message lists the reasons
  out_of_memory,        // a budget or the system is exhausted
  workspace_too_small,  // the caller's workspace is too small; the message names the bytes needed
  corrupt_file,         // a checkpoint, config or tokenizer file is malformed
  io,                   // the operating system refused a read or a mapping
  device_failure,       // a GPU driver or library refused a call, or an earlier call failed
};

// The message names the argument, its value and the limit; device_failure: the call and its status.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace fovea
