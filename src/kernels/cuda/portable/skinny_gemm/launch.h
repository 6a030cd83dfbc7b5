// SPDX-License-Identifier: Apache-2.0
// Products of a few rows with a matrix.
#pragma once

#include <array>

#include "kernels/cuda/common/skinny_gemm_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

class SkinnyProducts {
 public:
  // Loads every variant onto the current GPU. Errors as Kernel's constructor.
  SkinnyProducts(int sm, gpu::KernelStore& store);

  // Returns true if run() computes such a product.
  static bool serves(const SkinnyGemmParams& params);
  // Enqueues the product. It may start before the preceding kernel in the stream has ended; until
  // then it reads the weight only. The order of sums, and so the last bits, depend on the column
  // alone.
  void run(const SkinnyGemmParams& params, Stream stream) const;

  // Stages of a block, by variant. A multiprocessor has two blocks of the first, or one of the
  // second.
  static constexpr std::array<const char*, 2> kStages = {"6", "8"};
  static constexpr int32_t kMaxRows = 8;
  // Returns the variant that run() chooses.
  static size_t variant_of(const SkinnyGemmParams& params);
  // Enqueues the product with a given variant, for measurements.
  void run(const SkinnyGemmParams& params, size_t variant, Stream stream) const;

 private:
  std::array<Kernel, kStages.size()> kernels_;
};

}  // namespace fovea::kernels::cuda
