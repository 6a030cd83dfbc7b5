// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/portable/speculation/launch.h"

#include <algorithm>
#include <bit>

#include "core/rounding.h"
#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {
namespace {

Kernel load(const char* op, int sm, gpu::KernelStore& store) {
  return Kernel(make_variant(family("portable/speculation"), {op}, sm), store);
}

GridSize block_per_request(const DraftTrees& trees) {
  return {static_cast<uint32_t>(trees.requests)};
}

}  // namespace

DraftKernels::DraftKernels(int sm, gpu::KernelStore& store)
    : describe_(load("describe_drafts", sm, store)),
      accept_tokens_(load("accept_tokens", sm, store)),
      accept_sampled_(load("accept_sampled", sm, store)),
      commit_(load("commit_drafts", sm, store)) {}

void DraftKernels::describe(const DescribeDraftsParams& params, gpu::Launcher launcher) const {
  describe_.launch(block_per_request(params.trees), params, launcher, kOverlapped);
}

void DraftKernels::accept(const AcceptTokensParams& params, gpu::Launcher launcher) const {
  accept_tokens_.launch(block_per_request(params.trees), params, launcher, kOverlapped);
}

// One block fits a multiprocessor. A block is not worth less than 16 of the tiles.
void DraftKernels::accept(const AcceptSampledParams& params, int32_t multiprocessors,
                          gpu::Launcher launcher) const {
  constexpr uint32_t kMaxParts = kSumTiles / 16;
  const auto requests = static_cast<uint32_t>(params.trees.requests);
  const uint32_t parts = static_cast<uint32_t>(multiprocessors) / std::max(requests, 1u);
  const uint32_t blocks = std::bit_floor(std::clamp(parts, 1u, kMaxParts));
  accept_sampled_.launch({requests, blocks}, params, launcher, kOverlapped);
}

void DraftKernels::commit(const CommitDraftsParams& params, gpu::Launcher launcher) const {
  // Without pools, lengths and states change all the same.
  const int32_t pieces = std::max(params.piece_count, 1);
  commit_.launch({static_cast<uint32_t>(params.requests),
                  static_cast<uint32_t>(ceil_div(pieces, commit_.row_tile()))},
                 params, launcher, kOverlapped);
}

}  // namespace fovea::kernels::cuda
