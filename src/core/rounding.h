// SPDX-License-Identifier: Apache-2.0
// Division, rounding and divisibility of non-negative integers.
#pragma once

#include <cstdint>
#include <type_traits>

namespace fovea {

template <typename T>
constexpr T ceil_div(T a, std::type_identity_t<T> b) {
  return (a + b - 1) / b;
}

// Rounds up to a multiple of `step`.
template <typename T>
constexpr T round_up(T a, std::type_identity_t<T> step) {
  return ceil_div(a, step) * step;
}

// Returns the largest power of two that divides `value` and is at most `limit`, itself a power of
// two. Every power of two divides 0.
constexpr uint64_t power_of_two_in(uint64_t value, uint64_t limit) {
  const uint64_t bits = value | limit;
  return bits & (~bits + 1);
}

}  // namespace fovea
