// SPDX-License-Identifier: Apache-2.0
// Products and sums of sizes given by the caller, in checked 64-bit arithmetic.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "core/check.h"

namespace fovea {

// Both functions throw Error{invalid_argument} naming `what` if the result does not fit int64.
inline int64_t checked_product(std::string_view what, std::initializer_list<int64_t> factors) {
  int64_t result = 1;
  for (const int64_t factor : factors) {
    check_argument(!__builtin_mul_overflow(result, factor, &result), "{} overflows 64 bits", what);
  }
  return result;
}

inline int64_t checked_sum(std::string_view what, std::initializer_list<int64_t> terms) {
  int64_t result = 0;
  for (const int64_t term : terms) {
    check_argument(!__builtin_add_overflow(result, term, &result), "{} overflows 64 bits", what);
  }
  return result;
}

}  // namespace fovea
