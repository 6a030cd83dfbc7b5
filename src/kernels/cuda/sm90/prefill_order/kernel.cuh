// SPDX-License-Identifier: Apache-2.0
// Writes the list of sm90/prefill, for passes whose only plan it is.
#pragma once

#include "kernels/cuda/sm90/prefill_order/orderer.cuh"

namespace fovea::kernels::cuda {

template <int kThreads, Tiles kTiles>
using Config = PrefillOrderer<kThreads, kTiles>;

}  // namespace fovea::kernels::cuda
