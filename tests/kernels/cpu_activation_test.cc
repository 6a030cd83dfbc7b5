// SPDX-License-Identifier: Apache-2.0
// Gated activations against fp64 formulas.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "kernels/layer_ops.h"
#include "support/expect_close.h"
#include "support/random_values.h"

namespace fovea::kernels {
namespace {

using test::random_values;

double silu(double x) { return x / (1 + std::exp(-x)); }
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// A row of gates and ups with every activation.
std::vector<float> activated(Activation activation, const std::vector<float>& gates,
                             const std::vector<float>& ups) {
  ThreadPool threads(1);
  std::vector<float> out(gates.size());
  GatedActivationParams params;
  params.activation = activation;
  params.gate = gates.data();
  params.up = ups.data();
  params.out = out.data();
  params.rows = 1;
  params.dim = static_cast<int32_t>(gates.size());
  gated_activation(params, threads);
  return out;
}

TEST(GatedActivation, ErrorsAreRelativeFarFromZero) {
  std::vector<float> gates;
  for (float gate = -80; gate <= 80; gate += 0.37f) gates.push_back(gate);
  const std::vector<float> out =
      activated(Activation::silu, gates, std::vector<float>(gates.size(), 1));
  for (size_t i = 0; i < gates.size(); ++i) {
    const double expected = silu(static_cast<double>(gates[i]));
    EXPECT_NEAR(out[i] / expected, 1, 1e-6) << "gate " << gates[i];
  }
}

TEST(GatedActivation, NanStaysAndReachesNoNeighbour) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> gates = {1, nan, 2, 3}, ups = {1, 2, nan, 3};
  for (const Activation activation :
       {Activation::silu, Activation::gelu_tanh, Activation::clamped_swiglu}) {
    const std::vector<float> out = activated(activation, gates, ups);
    EXPECT_TRUE(std::isfinite(out[0]) && std::isfinite(out[3]));
    EXPECT_TRUE(std::isnan(out[1]) && std::isnan(out[2])) << static_cast<int>(activation);
  }
}

TEST(GatedActivation, MatchesFormulas) {
  ThreadPool threads(2);
  constexpr int32_t kRows = 9, kDim = 70;
  const std::vector<float> in = random_values(kRows * 2 * kDim, 5, -12, 12);
  std::vector<float> out(kRows * kDim);
  const auto run = [&](Activation activation, bool interleaved) {
    GatedActivationParams params;
    params.activation = activation;
    params.gate = in.data();
    params.up = in.data() + (interleaved ? 1 : kDim);
    params.in_row_stride = 2 * kDim;
    params.in_step = interleaved ? 2 : 1;
    params.out = out.data();
    params.out_row_stride = kDim;
    params.rows = kRows;
    params.dim = kDim;
    gated_activation(params, threads);
  };
  const auto expect = [&](bool interleaved, const std::function<double(double, double)>& formula) {
    for (size_t row = 0; row < kRows; ++row) {
      for (size_t i = 0; i < kDim; ++i) {
        const float* source = &in[row * 2 * kDim];
        const double gate = interleaved ? source[2 * i] : source[i];
        const double up = interleaved ? source[2 * i + 1] : source[kDim + i];
        const double expected = formula(gate, up);
        EXPECT_TRUE(test::is_near(out[row * kDim + i], expected, 2e-6 * (1 + std::fabs(expected))))
            << "row " << row << ", column " << i;
      }
    }
  };
  run(Activation::silu, false);
  expect(false, [](double gate, double up) { return silu(gate) * up; });
  run(Activation::gelu_tanh, false);
  expect(false, [](double gate, double up) {
    const double inner = std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate);
    return 0.5 * gate * (1 + std::tanh(inner)) * up;
  });
  run(Activation::clamped_swiglu, true);
  expect(true, [](double gate, double up) {
    const double g = std::min(gate, 7.0), u = std::min(7.0, std::max(-7.0, up));
    return (u + 1) * g * sigmoid(1.702 * g);
  });
}

}  // namespace
}  // namespace fovea::kernels
