// SPDX-License-Identifier: Apache-2.0
// The products of up to 8 rows with the experts that they chose, on Hopper.
#pragma once

#include <vector>

#include "kernels/cuda/common/skinny_experts_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

enum class ExpertProduct { gated, combined };  // see SkinnyExpertsParams

class ExpertProducts {
 public:
  // Loads every variant onto the current GPU; none unless it is a Hopper. Errors as Kernel's
  // constructor.
  ExpertProducts(int sm, gpu::KernelStore& store);

  // Returns true if run() computes such a product. is_kn: weights are [k, n], otherwise [n, k].
  bool serves(const SkinnyExpertsParams& params, bool is_kn) const;
  // Enqueues a product, with params.splits as splits_of() returns it. It may start before the
  // preceding kernel in the stream has ended. Until then the gated product reads addresses of
  // weights only; the combined product reads weights, ids and scales, so the preceding kernel must
  // be a gated product with the same ids. The order of sums, and so the last bits, depend on the
  // column, the row's experts and k, but not on the other rows.
  void run(ExpertProduct product, SkinnyExpertsParams params, bool is_kn, Stream stream) const;

  // Returns into how many blocks run() divides k.
  static int32_t splits_of(ExpertProduct product, bool is_kn);
  // Enqueues a product with params.splits blocks, for measurements and tests.
  void run_divided(ExpertProduct product, const SkinnyExpertsParams& params, bool is_kn,
                   Stream stream) const;

 private:
  std::vector<Kernel> kernels_;  // [product][is_kn]
};

}  // namespace fovea::kernels::cuda
