// SPDX-License-Identifier: Apache-2.0
#include "dist/rank_sums.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/check.h"
#include "kernels/cuda/store.h"

namespace fovea {

namespace cuda = kernels::cuda;

RankSums::RankSums(int gpu, int rank, int ranks, const RankSumsOptions& options)
    : context_(gpu),
      inbox_(2 * static_cast<size_t>(ranks) * static_cast<size_t>(options.max_values) * 2 *
             sizeof(uint32_t)),
      counters_(sizeof(cuda::RankCounters)),
      stop_(sizeof(uint32_t)),
      messages_{},
      kernels_(context_.info().sm, cuda::kernel_store()) {
  gpu::fill_bytes(inbox_.data(), 0, inbox_.bytes(), nullptr);
  gpu::fill_bytes(counters_.data(), 0, counters_.bytes(), nullptr);
  gpu::synchronize(nullptr);
  *stop_.data<uint32_t>() = 0;
  messages_.counters = counters_.data<cuda::RankCounters>();
  messages_.stop = stop_.data<uint32_t>();
  messages_.capacity = options.max_values;
  messages_.timeout_ns = std::chrono::nanoseconds(options.timeout).count();
  messages_.rank = rank;
  messages_.ranks = ranks;
}

RankSums::~RankSums() { context_.bind_to_free(); }

bool RankSums::add(const cuda::ResidualParams& params, Stream stream) {
  const cuda::SumResidualParams sum{params, messages_};
  if (!cuda::RankSum::serves(sum)) return false;
  kernels_.add(sum, stream);
  return true;
}

bool RankSums::all_reduce(const float* send, float* receive, int64_t count, Stream stream) {
  const cuda::SumValuesParams sum{send, receive, count, messages_};
  if (!cuda::RankSum::serves(sum)) return false;
  kernels_.sum(sum, stream);
  return true;
}

void RankSums::stop() { std::atomic_ref(*messages_.stop).store(1); }

void RankSums::check() const {
  if (std::atomic_ref(*messages_.stop).load() == 0) return;
  fail(ErrorCode::device_failure, "rank {} has stopped waiting for sums of the others",
       messages_.rank);
}

std::string why_no_rank_sums(std::span<const int> gpus) {
  if (gpus.size() > cuda::kMaxSumRanks) {
    return fmt::format("there are {} ranks, at most {} write into each other's memory", gpus.size(),
                       cuda::kMaxSumRanks);
  }
  for (const int from : gpus) {
    for (const int to : gpus) {
      if (from == to || gpu::Context(from).can_access(gpu::Context(to))) continue;
      return fmt::format("GPU {} cannot access the memory of GPU {}", from, to);
    }
  }
  return {};
}

std::vector<std::unique_ptr<RankSums>> make_rank_sums(std::span<const int> gpus,
                                                      const RankSumsOptions& options) {
  check_argument(options.max_values > 0 && options.max_values % cuda::kMessageValues == 0,
                 "max_values is {}, must be a positive multiple of {}", options.max_values,
                 cuda::kMessageValues);
  if (const std::string why = why_no_rank_sums(gpus); !why.empty()) {
    fail(ErrorCode::unsupported, "{}", why);
  }
  std::vector<std::unique_ptr<RankSums>> ranks;
  for (const int gpu : gpus) {
    const auto rank = static_cast<int>(ranks.size());
    ranks.emplace_back(new RankSums(gpu, rank, static_cast<int>(gpus.size()), options));
  }
  for (const auto& rank : ranks) {
    for (size_t other = 0; other < ranks.size(); ++other) {
      const RankSums& there = *ranks[other];
      const bool same = there.context_.info().index == rank->context_.info().index;
      if (!same) rank->context_.allow_access_to(there.context_);
      rank->messages_.inboxes[other] = there.inbox_.data<uint32_t>();
    }
  }
  return ranks;
}

}  // namespace fovea
