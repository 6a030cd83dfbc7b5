// SPDX-License-Identifier: Apache-2.0
// Soft cap of scores that are well below it, read by host and device code alike.
#pragma once

namespace fovea::kernels::cuda {

// A capped score is outer * tanh(score / cap). Its inner score is score / cap in units in which
// scores near enough for the polynomial are those below kNearInner: a bit of their pattern tells.
constexpr float kNearTanh = 0.625f;
constexpr float kNearInner = 2;

// tanh(x) / x to 1.1e-7 of its value for |x| <= kNearTanh, in powers of x^2: a minimax polynomial.
constexpr int kCapTerms = 5;
constexpr double kTanhTerms[kCapTerms] = {0.9999998931922379, -0.3333195445421652,
                                          0.1330452786893455, -0.05182193033682869,
                                          0.015051017395575966};

// Operands from constant memory: in registers they left room for one score at a time.
struct NearCap {
  float unit;              // from scores to inner scores
  float terms[kCapTerms];  // of inner^2; times the inner score, in units of log2
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
