// SPDX-License-Identifier: Apache-2.0
// Whole numbers that are not negative, divided and rounded up.
#pragma once

#include <type_traits>

namespace fovea {

template <typename T>
constexpr T ceil_div(T a, std::type_identity_t<T> b) {
  return (a + b - 1) / b;
}

// The next multiple of `step`.
template <typename T>
constexpr T round_up(T a, std::type_identity_t<T> step) {
  return ceil_div(a, step) * step;
}

}  // namespace fovea
