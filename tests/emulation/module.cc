// SPDX-License-Identifier: Apache-2.0
// One kernel for the emulated GPU: the text that make_variant() gives a compiler, as a library.
// FOVEA_HEADER: its kernel.cuh; FOVEA_VALUES: its line of variants.txt; __CUDA_ARCH__.
#include "emulation/cuda.h"
#include "kernels/cuda/common/types.cuh"

namespace fovea::kernels::cuda {

__shared__ __align__(1024) char dynamic_shared[227 << 10];  // what a block of sm_90 may have

}  // namespace fovea::kernels::cuda

#include FOVEA_HEADER

using namespace fovea::kernels::cuda;
FOVEA_KERNEL_ENTRY(Config<FOVEA_VALUES>)

extern "C" __attribute__((visibility("default"))) void emulated_launch(uint32_t grid_x,
                                                                       uint32_t grid_y,
                                                                       bool descending,
                                                                       void** arguments) {
  const auto& params = *static_cast<const Entry::Params*>(arguments[0]);
  fovea::emulation::machine.launch({grid_x, grid_y, 1}, Entry::kTraits.threads, descending,
                                   dynamic_shared, Entry::kTraits.shared_bytes,
                                   sizeof(dynamic_shared), [&] { fovea_kernel(params); });
}
