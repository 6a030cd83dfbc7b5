// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sm90/recurrent_decode/launch.h"

#include <algorithm>
#include <string>

#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {
namespace {

constexpr int32_t kColumns = 128;
constexpr int32_t kTileRows = 16;

}  // namespace

bool RecurrentDecode::serves(const RecurrentDecodeSetup& setup) {
  return setup.sm == 90 && setup.columns == kColumns && setup.rows % kTileRows == 0 &&
         setup.state_type != StateType::f32;
}

gpu::KernelVariant RecurrentDecode::variant(const RecurrentDecodeSetup& setup) {
  const char* const state = setup.state_type == StateType::bf16 ? "bf16" : "f16";
  return make_variant(family("sm90/recurrent_decode"),
                      {recurrence_name(setup.kind), std::to_string(kColumns), state}, setup.sm);
}

RecurrentDecode::RecurrentDecode(const RecurrentDecodeSetup& setup, gpu::KernelStore& store)
    : multiprocessors_(setup.multiprocessors), kernel_(variant(setup), store) {}

void RecurrentDecode::run(const RecurrenceParams& params, gpu::Launcher launcher) const {
  const int64_t tiles =
      int64_t{params.requests} * params.heads * (params.rows / kernel_.row_tile());
  const int64_t blocks = std::min<int64_t>(tiles, multiprocessors_);
  kernel_.launch({static_cast<uint32_t>(blocks)}, params, launcher, kOverlapped);
}

}  // namespace fovea::kernels::cuda
