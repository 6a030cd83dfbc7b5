// SPDX-License-Identifier: Apache-2.0
// Products of every head's rows with a matrix of its own: MLA's projections into and out of the
// latent space.
#pragma once

#include <vector>

#include "fovea/dtype.h"
#include "gpu/kernel_pack.h"
#include "kernels/cuda/common/head_gemm_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

enum class WeightOrder : uint8_t { nk, kn };

// The bits of a row depend on that row and the weights alone.
class HeadGemm {
 public:
  HeadGemm() = default;
  // dtype bf16 or f16. Errors as Kernel's constructor.
  HeadGemm(WeightOrder order, DType dtype, int sm, gpu::KernelStore& store);

  // What the constructor takes from the store.
  static std::vector<gpu::KernelVariant> variants(WeightOrder order, DType dtype, int sm);

  // Enqueues params, whose row_tiles and groups are set here; legal in a capture. Weights may be
  // read before what is ahead in the stream has ended.
  void run(HeadGemmParams params, Stream stream) const;

 private:
  Kernel few_, many_, several_tiles_;
};

}  // namespace fovea::kernels::cuda
