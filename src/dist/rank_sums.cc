// SPDX-License-Identifier: Apache-2.0
#include "dist/rank_sums.h"

#include <utility>

#include "core/check.h"
#include "kernels/cuda/store.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;

int sm_of(const gpu::Context& context) {
  context.bind();
  return context.info().sm;
}

}  // namespace

RankSums::RankSums(std::unique_ptr<PeerInbox> inbox)
    : inbox_(std::move(inbox)), kernels_(sm_of(inbox_->context()), cuda::kernel_store()) {}

bool RankSums::sends(int64_t rows, int64_t dim) const {
  return dim % 4 == 0 && dim <= cuda::RankSum::kMaxDim && rows * dim <= boxes().part_stride;
}

bool RankSums::add_sent(const cuda::ResidualParams& params, Stream stream) {
  cuda::RankBoxes boxes = inbox_->boxes();
  boxes.sends = 0;
  return add(params, boxes, stream);
}

bool RankSums::add(const cuda::ResidualParams& params, const cuda::RankBoxes& boxes,
                   Stream stream) {
  const cuda::SumResidualParams sum{params, boxes};
  if (!cuda::RankSum::serves(sum)) return false;
  kernels_.add(sum, stream);
  return true;
}

bool RankSums::all_reduce(const float* send, float* receive, int64_t count, Stream stream) {
  const cuda::SumValuesParams sum{send, receive, count, inbox_->boxes()};
  if (!cuda::RankSum::serves(sum)) return false;
  kernels_.sum(sum, stream);
  return true;
}

int64_t max_values_of(const RankSumsOptions& options, int ranks) {
  constexpr int64_t kAllValues = int64_t{1} << 21;
  check_argument(options.max_values >= 0 && options.max_values % 4 == 0,
                 "max_values is {}, must be 0 or a positive multiple of 4", options.max_values);
  return options.max_values > 0 ? options.max_values : kAllValues / ranks / 4 * 4;
}

std::vector<std::unique_ptr<RankSums>> make_rank_sums(std::span<const int> gpus,
                                                      const RankSumsOptions& options) {
  const int64_t values = max_values_of(options, static_cast<int>(gpus.size()));
  std::vector<std::unique_ptr<RankSums>> ranks;
  for (auto& inbox : make_peer_inboxes(gpus, values, options.timeout)) {
    ranks.push_back(std::make_unique<RankSums>(std::move(inbox)));
  }
  return ranks;
}

}  // namespace fovea
