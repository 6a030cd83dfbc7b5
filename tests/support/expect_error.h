// SPDX-License-Identifier: Apache-2.0
// Checks of calls that must throw an Error, and of its message.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <string_view>

#include "fovea/error.h"

namespace fovea::test {

// Returns the message of the Error of `code` that `action` must throw.
template <typename Action>
std::string error_of(const Action& action, ErrorCode code = ErrorCode::invalid_argument) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "nothing was thrown";
}

// Expects that message to contain each of `parts`.
template <typename Action>
void expect_error(ErrorCode code, std::initializer_list<std::string_view> parts,
                  const Action& action) {
  const std::string message = error_of(action, code);
  for (const std::string_view part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "no \"" << part << "\" in: " << message;
  }
}

template <typename Action>
void expect_error(ErrorCode code, std::string_view part, const Action& action) {
  expect_error(code, {part}, action);
}

template <typename Action>
void expect_invalid(std::string_view part, const Action& action) {
  expect_error(ErrorCode::invalid_argument, {part}, action);
}

}  // namespace fovea::test
