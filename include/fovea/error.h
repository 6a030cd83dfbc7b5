// SPDX-License-Identifier: Apache-2.0
// The one exception type of the library. It is thrown while something is built, checked or planned;
// expected outcomes (a full pool, a rejected backend) are return values, not exceptions.
#pragma once

#include <stdexcept>
#include <string>

namespace fovea {

enum class ErrorCode {
  invalid_argument,     // the caller passed something outside the documented limits
  unsupported,          // valid, but nothing here can do it; the message lists the reasons
  out_of_memory,        // a budget or the system is exhausted
  workspace_too_small,  // a caller-provided workspace is short; the message names the needed bytes
  corrupt_file,         // a checkpoint, config or tokenizer file is malformed
  io,                   // the operating system refused a read or a mapping
  device_failure,       // a GPU's driver or library refused a call, or an earlier one failed
};

// what() names the argument, its value and the limit; device_failure: the call and its status.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace fovea
