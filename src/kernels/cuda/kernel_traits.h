// SPDX-License-Identifier: Apache-2.0
// What a compiled kernel says about itself, as KernelTraits in common/types.cuh.
#pragma once

#include <cstdint>

namespace fovea::kernels::cuda {

inline constexpr char kTraitsSymbol[] = "fovea_traits";

struct Traits {
  int32_t threads;       // of a block
  int32_t shared_bytes;  // dynamic
  int32_t row_tile;
  int32_t key_tile;
};

}  // namespace fovea::kernels::cuda
