// SPDX-License-Identifier: Apache-2.0
// Grouped products of a mixture of experts on a GPU.
#pragma once

#include "kernels/cuda/common/layer_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

class ExpertGemm {
 public:
  // Loads every kernel onto the current GPU. Errors as Kernel's constructor.
  ExpertGemm(int sm, gpu::KernelStore& store);

  // Enqueues the product of the rows that chose an expert with its weights, for every one of
  // `experts`. Sets params.row_tiles. is_kn: weights are [k, n], otherwise [n, k].
  void run(ExpertGemmParams params, int32_t experts, bool is_kn, Stream stream) const;

 private:
  struct Layout {
    Kernel small_tiles, large_tiles;  // by rows
  };

  static Layout load(bool is_kn, int sm, gpu::KernelStore& store);

  Layout nk_, kn_;
};

}  // namespace fovea::kernels::cuda
