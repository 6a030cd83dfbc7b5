// SPDX-License-Identifier: Apache-2.0
// Gates and steps of Mamba1 layers, and gates of short convolutions, against fp64 formulas.
#include <gtest/gtest.h>

#include <cmath>
#include <utility>
#include <vector>

#include "kernels/layer_ops.h"
#include "support/expect_close.h"
#include "support/random_values.h"

namespace fovea::kernels {
namespace {

using test::random_values;

void expect_close(float actual, double expected, const char* what, size_t index) {
  EXPECT_TRUE(test::is_near(actual, expected, 2e-6 * (1 + std::fabs(expected))))
      << what << " at " << index;
}

TEST(ScanGates, MatchFormulasOverTheWholeRange) {
  ThreadPool threads(2);
  constexpr int32_t kRows = 5, kDim = 7, kStride = 9;
  const std::vector<float> x = random_values(kRows * kStride, 3, -4, 4);
  const std::vector<float> gate = random_values(kRows * kDim, 4, -90, 90);
  for (const auto& [gated, plain] : {std::pair(true, false), {true, true}, {false, false}}) {
    std::vector<float> out(kRows * kDim);
    silu_gate({.x = x.data(),
               .gate = gated ? gate.data() : nullptr,
               .plain = plain,
               .out = out.data(),
               .x_row_stride = kStride,
               .gate_row_stride = kDim,
               .out_row_stride = kDim,
               .rows = kRows,
               .dim = kDim},
              threads);
    for (size_t i = 0; i < out.size(); ++i) {
      const double value = x[i / kDim * kStride + i % kDim], g = gate[i];
      const double factor = !gated ? 1 : plain ? g : g / (1 + std::exp(-g));
      expect_close(out[i], value * factor, "silu_gate", i);
    }
  }
  std::vector<float> soft = gate;
  softplus(soft.data(), static_cast<int64_t>(soft.size()), threads);
  for (size_t i = 0; i < soft.size(); ++i) {
    expect_close(soft[i], std::log1p(std::exp(static_cast<double>(gate[i]))), "softplus", i);
  }
}

}  // namespace
}  // namespace fovea::kernels
