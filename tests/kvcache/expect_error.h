// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "fovea/error.h"

namespace fovea {

// Runs `action`, which must throw an Error of `code` whose message holds `part`.
template <typename Action>
void expect_error(ErrorCode code, const std::string& part, Action action) {
  try {
    action();
    ADD_FAILURE() << "no error, expected one with: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

template <typename Action>
void expect_invalid(const std::string& part, Action action) {
  expect_error(ErrorCode::invalid_argument, part, action);
}

}  // namespace fovea
