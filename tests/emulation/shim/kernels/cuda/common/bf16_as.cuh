// SPDX-License-Identifier: Apache-2.0
// Replaces src/kernels/cuda/common/bf16_as.cuh.
#pragma once

#include <algorithm>

#include "kernels/cuda/common/ptx.cuh"

namespace fovea::kernels::cuda {

template <Type kTo>
uint32_t bf16_as(uint32_t pair) {
  const auto value = [&](int half) {
    return std::clamp(half_of<bf16>(pair, half), -65504.0f, 65504.0f);
  };
  return kTo == bf16 ? pair : pack<kTo>(value(0), value(1));
}

template <Type kTo>
uint4 bf16_as(const uint4& pairs) {
  return {bf16_as<kTo>(pairs.x), bf16_as<kTo>(pairs.y), bf16_as<kTo>(pairs.z),
          bf16_as<kTo>(pairs.w)};
}

}  // namespace fovea::kernels::cuda
