// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sm90/mla_decode_16/launch.h"

#include <string>

#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/sm90/mla_common/launch.h"

namespace fovea::kernels::cuda {
namespace {

constexpr int32_t kColumns = 64;     // columns of a column tile
constexpr uint32_t kStageTiles = 2;  // column tiles of a stage of keys

}  // namespace

gpu::KernelVariant mla_decode_16_variant(const MlaDecodeSetup& setup, MlaJoins joins) {
  return make_variant(
      family("sm90/mla_decode_16"),
      {std::to_string(setup.rank), std::to_string(setup.rope), *variant_type(setup.dtype),
       keys_name(setup), joins == MlaJoins::clusters ? "clusters" : "blocks"},
      setup.sm);
}

void launch_mla_decode_16(const MlaPass& pass, const Kernel& kernel, gpu::Launcher launcher) {
  const MlaBlockShape shape = {.rows = kMlaClusterRows,
                               .query_tiles = static_cast<uint32_t>(pass.setup.rank / kColumns),
                               .key_tiles = kStageTiles};
  kernel.launch({static_cast<uint32_t>(pass.work.workers)}, decode_params(pass, shape), launcher,
                {.overlapped = true, .cluster = static_cast<uint32_t>(pass.work.cluster)});
}

}  // namespace fovea::kernels::cuda
