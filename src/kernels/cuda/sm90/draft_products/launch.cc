// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sm90/draft_products/launch.h"

#include <string>

#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {
namespace {

constexpr int32_t kColumns = 128;
constexpr int32_t kTileRows = 64;  // the smallest part of a state that a block takes
// Rows of a multiprocessor up to which sm90/recurrent_drafts is faster: one request.
constexpr int32_t kFewRows = 64;
// Large blocks of a multiprocessor from which on they are not halved. Those of KDA have more to
// prepare (chosen on H200, 2026-12-01: 8 requests at least 10 % faster).
constexpr int32_t kRoundsOfLarge = 6, kRoundsOfLargeKda = 1;

}  // namespace

bool DraftProducts::serves(const RecurrentDecodeSetup& setup) {
  return setup.sm == 90 && setup.columns == kColumns && setup.rows % kTileRows == 0 &&
         setup.state_type != StateType::f32;
}

gpu::KernelVariant DraftProducts::variant(const RecurrentDecodeSetup& setup) {
  const char* const state = setup.state_type == StateType::bf16 ? "bf16" : "f16";
  return make_variant(family("sm90/draft_products"),
                      {recurrence_name(setup.kind), std::to_string(kColumns), state}, setup.sm);
}

DraftProducts::DraftProducts(const RecurrentDecodeSetup& setup, gpu::KernelStore& store)
    : multiprocessors_(setup.multiprocessors),
      rounds_of_large_(setup.kind == RecurrenceKind::kda ? kRoundsOfLargeKda : kRoundsOfLarge),
      kernel_(variant(setup), store) {}

bool DraftProducts::is_faster(const RecurrenceParams& params) const {
  return rows_of(params) > int64_t{multiprocessors_} * kFewRows;
}

void DraftProducts::run(RecurrenceParams params, gpu::Launcher launcher) const {
  const int32_t large = kernel_.row_tile();
  const bool is_large = params.rows % large == 0 &&
                        rows_of(params) >= int64_t{multiprocessors_} * rounds_of_large_ * large;
  params.tiles = params.rows / (is_large ? large : kTileRows);
  kernel_.launch(
      {static_cast<uint32_t>(params.heads * params.tiles), static_cast<uint32_t>(params.requests)},
      params, launcher, kOverlapped);
}

int64_t DraftProducts::rows_of(const RecurrenceParams& params) {
  return int64_t{params.requests} * params.heads * params.rows;
}

}  // namespace fovea::kernels::cuda
