// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace fovea {

// Log-sum-exps of rows of scores, f32 [tokens, heads]: natural logarithms, -inf where a row saw no
// key. The base is part of the type because states merged over two bases are quietly wrong: values
// to base 2 (FlashInfer's) are multiplied by ln 2 before they become this.
struct NaturalLse {
  NaturalLse() = default;
  explicit NaturalLse(float* values) : data(values) {}
  explicit operator bool() const { return data != nullptr; }

  float* data = nullptr;
};

}  // namespace fovea
