// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/portable/sampling/launch.h"

#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {

Sampling::Sampling(int sm, gpu::KernelStore& store) {
  const Family& sampling = family("portable/sampling");
  kernel_ = Kernel(make_variant(sampling, sampling.baked.front(), sm), store);
}

void Sampling::draw(const DrawParams& params, int32_t draws, Stream stream) const {
  kernel_.launch({static_cast<uint32_t>(draws)}, params, stream);
}

}  // namespace fovea::kernels::cuda
