// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sm90/recurrent_decode/launch.h"

#include <string>

#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {
namespace {

constexpr int32_t kColumns = 128;
constexpr int32_t kTileRows = 8;  // the smallest part of a state that a block takes
constexpr int32_t kFewRows = 64;  // a multiprocessor

}  // namespace

bool RecurrentDecode::serves(const RecurrentDecodeSetup& setup) {
  return setup.sm == 90 && setup.columns == kColumns && setup.rows % kTileRows == 0;
}

gpu::KernelVariant RecurrentDecode::variant(const RecurrentDecodeSetup& setup) {
  constexpr const char* kStates[] = {"f32", "bf16", "f16"};
  return make_variant(family("sm90/recurrent_decode"),
                      {recurrence_name(setup.kind), std::to_string(kColumns),
                       kStates[static_cast<size_t>(setup.state_type)]},
                      setup.sm);
}

RecurrentDecode::RecurrentDecode(const RecurrentDecodeSetup& setup, gpu::KernelStore& store)
    : multiprocessors_(setup.multiprocessors), kernel_(variant(setup), store) {}

bool RecurrentDecode::is_faster(const RecurrenceParams& params) const {
  const int64_t rows = int64_t{params.requests} * params.heads * params.rows;
  return !params.state_is_ready || params.state_type != StateType::f32 ||
         rows > int64_t{multiprocessors_} * kFewRows;
}

void RecurrentDecode::run(RecurrenceParams params, gpu::Launcher launcher) const {
  const int64_t rows = int64_t{params.requests} * params.heads * params.rows;
  int32_t block_rows = kernel_.row_tile();
  // Smaller blocks where there is not one for each multiprocessor, or where they divide a head.
  while (block_rows > kTileRows &&
         (rows < int64_t{multiprocessors_} * block_rows || params.rows % block_rows != 0)) {
    block_rows /= 2;
  }
  params.tiles = params.rows / block_rows;
  kernel_.launch(
      {static_cast<uint32_t>(params.heads * params.tiles), static_cast<uint32_t>(params.requests)},
      params, launcher, kOverlapped);
}

}  // namespace fovea::kernels::cuda
