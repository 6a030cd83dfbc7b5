// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sm90/mla_decode_fp8_narrow/launch.h"

#include <string>

#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/sm90/mla_common/launch.h"

namespace fovea::kernels::cuda {
namespace {

constexpr int32_t kColumns = 64;  // columns of a column tile

}  // namespace

gpu::KernelVariant mla_decode_fp8_narrow_variant(const MlaDecodeSetup& setup, int32_t rows) {
  return make_variant(family("sm90/mla_decode_fp8_narrow"),
                      {std::to_string(setup.rank), std::to_string(setup.rope),
                       *variant_type(setup.dtype), keys_name(setup), std::to_string(rows)},
                      setup.sm);
}

void launch_mla_decode_fp8_narrow(const MlaPass& pass, int32_t rows, const Kernel& kernel,
                                  gpu::Launcher launcher) {
  const MlaBlockShape shape = {.rows = rows,
                               .query_tiles = static_cast<uint32_t>(pass.setup.rank / kColumns),
                               .key_tiles = 0};
  kernel.launch({static_cast<uint32_t>(pass.work.workers)}, decode_params(pass, shape), launcher,
                kOverlapped);
}

}  // namespace fovea::kernels::cuda
