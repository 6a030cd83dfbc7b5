// SPDX-License-Identifier: Apache-2.0
// Parameter blocks of sums over the GPUs of a process, read by host and device code alike.
#pragma once

#include "kernels/cuda/common/layer_params.h"
#include "kernels/cuda/common/rank_boxes.h"

namespace fovea::kernels::cuda {

// As ResidualParams, with the sum over the ranks of their branches, added in the order of the
// ranks. dim is a multiple of 4, and arrays are aligned to 16 bytes. One block a row. Without
// boxes.sends, the product before it has sent the branch (SkinnyGemmParams::boxes).
struct SumResidualParams {
  ResidualParams residual;
  RankBoxes boxes;
};

// receive[i] = sum over the ranks of send[i]. count is a multiple of 4, and arrays, which may be
// the same, are aligned to 16 bytes.
struct SumValuesParams {
  const float* send;
  float* receive;
  int64_t count;
  RankBoxes boxes;
};

}  // namespace fovea::kernels::cuda
