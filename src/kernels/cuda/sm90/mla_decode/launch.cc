// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sm90/mla_decode/launch.h"

#include <string>

#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/sm90/mla_common/launch.h"

namespace fovea::kernels::cuda {
namespace {

constexpr int32_t kColumns = 64;  // columns of a column tile

// As the kernel's configuration has them: one box brings half of the latent columns; queries only
// where the copy engine loads keys too.
MlaBlockShape block_shape(const MlaDecodeSetup& setup) {
  const auto half_tiles = static_cast<uint32_t>(setup.rank / 2 / kColumns);
  return {.rows = 64, .query_tiles = loads_pages(setup) ? half_tiles : 1, .key_tiles = half_tiles};
}

}  // namespace

gpu::KernelVariant mla_decode_variant(const MlaDecodeSetup& setup, MlaJoins joins) {
  const char* blocks = joins == MlaJoins::pairs ? "pairs" : row_blocks(setup) == 2 ? "two" : "one";
  return make_variant(family("sm90/mla_decode"),
                      {std::to_string(setup.rank), std::to_string(setup.rope),
                       *variant_type(setup.dtype), keys_name(setup), blocks},
                      setup.sm);
}

void launch_mla_decode(const MlaPass& pass, const Kernel& kernel, gpu::Launcher launcher) {
  const int32_t row_blocks = cuda::row_blocks(pass.setup);
  // Two blocks over the same keys are a cluster: over fp8 rows they convert for each other, as
  // pairs they send each other values. The others only need to run at the same time, but without a
  // cluster they do not always: a preceding kernel may free multiprocessors one by one.
  kernel.launch({static_cast<uint32_t>(pass.work.workers * row_blocks)},
                decode_params(pass, block_shape(pass.setup)), launcher,
                {.overlapped = true, .cluster = static_cast<uint32_t>(row_blocks)});
}

}  // namespace fovea::kernels::cuda
