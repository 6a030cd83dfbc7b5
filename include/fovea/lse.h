// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "fovea/api.h"

namespace FOVEA_API fovea {

// The log-sum-exp of each row of scores, f32 [tokens, heads]: natural logarithm, -inf if a row saw
// no key. The base is part of the type because merging states of two bases gives wrong results
// without an error. Multiply values to base 2 (FlashInfer) by ln 2 first.
struct NaturalLse {
  NaturalLse() = default;
  explicit NaturalLse(float* values) : data(values) {}
  explicit operator bool() const { return data != nullptr; }

  float* data = nullptr;
};

}  // namespace fovea
