// SPDX-License-Identifier: Apache-2.0
// Scores are kept in log2 units, those of exp2_fast; LSE is natural.
#pragma once

namespace fovea::kernels::cuda {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

}  // namespace fovea::kernels::cuda
