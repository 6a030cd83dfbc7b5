// SPDX-License-Identifier: Apache-2.0
// One kernel for the emulated GPU as a library: the text that make_variant() gives a compiler.
// FOVEA_HEADER is its kernel.cuh, FOVEA_VALUES its line of variants.txt. With FOVEA_LOADED_ONLY,
// backends load the kernel but no test may launch it; that takes a third of the time to compile.
#include "emulation/cuda.h"
#include "kernels/cuda/common/types.cuh"

namespace fovea::kernels::cuda {

__shared__ __align__(1024) char dynamic_shared[227 << 10];  // maximum of a block on sm_90

}  // namespace fovea::kernels::cuda

#include FOVEA_HEADER

using namespace fovea::kernels::cuda;
#ifdef FOVEA_LOADED_ONLY
using Entry = Config<FOVEA_VALUES>;
extern "C" __constant__ const KernelTraits fovea_traits = Entry::kTraits;
void fovea_kernel(const Entry::Params&) {
  fovea::emulation::fail("the kernel is one of those that are only loaded");
}
#else
FOVEA_KERNEL_ENTRY(Config<FOVEA_VALUES>)
#endif

#define FOVEA_EXPORTED extern "C" __attribute__((visibility("default")))

FOVEA_EXPORTED const size_t emulated_params_bytes = sizeof(Entry::Params);

FOVEA_EXPORTED fovea::emulation::Run* emulated_launch(const fovea::emulation::Launch& launch,
                                                      const void* params_at) {
  const auto& params = *static_cast<const Entry::Params*>(params_at);
  auto run = std::make_unique<fovea::emulation::Run>(
      launch, fovea::emulation::Kernel{
                  .threads = Entry::kTraits.threads,
                  .blocks_per_sm = Entry::kBlocksPerSm,
                  .shared_bytes = Entry::kTraits.shared_bytes,
                  .shared_limit = sizeof(dynamic_shared),
                  .shared = [] { return dynamic_shared; },
                  .body = [params] { fovea_kernel(params); },
              });
  return run->advance(false) ? nullptr : run.release();
}

FOVEA_EXPORTED void emulated_finish(fovea::emulation::Run* run) {
  run->advance(true);
  delete run;
}
