// SPDX-License-Identifier: Apache-2.0
#include "c/status.h"

#include <new>
#include <stdexcept>
#include <string>

namespace fovea::c {
namespace {

thread_local std::string last_error;
// Replaces last_error if there was no memory for it.
thread_local const char* short_error = nullptr;

fovea_status status_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
      return FOVEA_INVALID_ARGUMENT;
    case ErrorCode::unsupported:
      return FOVEA_UNSUPPORTED;
    case ErrorCode::out_of_memory:
      return FOVEA_OUT_OF_MEMORY;
    case ErrorCode::workspace_too_small:
      return FOVEA_WORKSPACE_TOO_SMALL;
    case ErrorCode::corrupt_file:
      return FOVEA_CORRUPT_FILE;
    case ErrorCode::io:
      return FOVEA_IO;
    case ErrorCode::device_failure:
      return FOVEA_DEVICE_FAILURE;
  }
  return FOVEA_INTERNAL;
}

}  // namespace

fovea_status failed(fovea_status status, std::string_view message) noexcept {
  try {
    last_error = message;
    short_error = nullptr;
  } catch (...) {
    short_error = "the system has no memory for the message";
  }
  return status;
}

fovea_status status_of_exception() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    return failed(status_of(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    return failed(FOVEA_OUT_OF_MEMORY, "the system has no memory for this call");
  } catch (const std::length_error&) {
    return failed(FOVEA_OUT_OF_MEMORY, "the system has no memory for this call");
  } catch (const std::exception& error) {
    return failed(FOVEA_INTERNAL, error.what());
  } catch (...) {
    return failed(FOVEA_INTERNAL, "an unknown exception");
  }
}

}  // namespace fovea::c

const char* fovea_last_error() {
  using namespace fovea::c;
  return short_error != nullptr ? short_error : last_error.c_str();
}
