// SPDX-License-Identifier: Apache-2.0
// Constants for the soft cap of scores well below the cap, read by host and device code alike.
#pragma once

namespace fovea::kernels::cuda {

// A capped score is outer * tanh(score / cap). Its inner score is score / cap in such units that
// the polynomial serves inner scores below kNearInner, which one bit of their pattern tells.
constexpr float kNearTanh = 0.625f;
constexpr float kNearInner = 2;

// A minimax polynomial for tanh(x) / x in powers of x^2, with a relative error of 1.1e-7 for |x| <=
// kNearTanh.
constexpr int kCapTerms = 5;
constexpr double kTanhTerms[kCapTerms] = {0.9999998931922379, -0.3333195445421652,
                                          0.1330452786893455, -0.05182193033682869,
                                          0.015051017395575966};

// Kept in constant memory: in registers these operands would leave room for one score at a time.
struct NearCap {
  float unit;              // factor from scores to inner scores
  float terms[kCapTerms];  // coefficients of inner^2; the product with inner is in units of log2
};

constexpr NearCap near_cap(float cap) {
  NearCap near{static_cast<float>(kNearInner / (static_cast<double>(kNearTanh) * cap)), {}};
  const double step = static_cast<double>(kNearTanh) / kNearInner;
  double power = step * cap * 1.4426950408889634;
  for (int i = 0; i < kCapTerms; ++i, power *= step * step) {
    near.terms[i] = static_cast<float>(kTanhTerms[i] * power);
  }
  return near;
}

}  // namespace fovea::kernels::cuda
