// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sm90/prefill_order/launch.h"

#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {

gpu::KernelVariant prefill_order_variant(bool segments, int sm) {
  return make_variant(family("sm90/prefill_order"), {"256", segments ? "cut" : "whole"}, sm);
}

}  // namespace fovea::kernels::cuda
