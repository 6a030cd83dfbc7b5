// SPDX-License-Identifier: Apache-2.0
#include "engine/rank_links.h"

#include <fmt/format.h>

#include "fovea/error.h"
#include "fovea/nccl_communicator.h"

namespace fovea {
namespace {

size_t index(int rank) { return static_cast<size_t>(rank); }

// Ranks on GPUs meet on the host only while they are loaded, which takes any time.
ThreadCommunicatorOptions host_options(ThreadCommunicatorOptions options, bool on_gpus) {
  if (on_gpus) options.timeout = std::chrono::hours(1);
  return options;
}

}  // namespace

RankLinks::RankLinks(RankThreads& threads, const std::vector<int>& gpus,
                     const ParallelOptions& parallel)
    : threads_(threads),
      share_contexts_(parallel.context_parallel > 1),
      divide_experts_(parallel.expert_parallel),
      timeout_(parallel.communicator.timeout),
      host_(make_thread_communicators(threads.size(),
                                      host_options(parallel.communicator, !gpus.empty()))) {
  if (gpus.empty()) return;
  for (const int gpu : gpus) contexts_.push_back(std::make_unique<gpu::Context>(gpu));
  const NcclId id = make_nccl_id();
  nccl_.resize(gpus.size());
  threads_.run([&](int rank) {
    nccl_[index(rank)] =
        make_nccl_communicator(id, rank, threads_.size(), {DeviceKind::cuda, gpus[index(rank)]});
  });
  why_no_sums_ = why_no_peers(gpus);
  if (!why_no_sums_.empty()) return;
  sums_ = make_rank_sums(gpus, {.timeout = timeout_});
  if (share_contexts_) links_ = make_context_links(gpus, {.timeout = timeout_});
}

RankLinks::~RankLinks() {
  if (nccl_.empty()) return;
  threads_.run([&](int rank) {
    contexts_[index(rank)]->bind_to_free();
    nccl_[index(rank)].reset();
  });
}

ModelRanks RankLinks::of(int rank) const {
  ModelRanks ranks;
  ranks.share_contexts = share_contexts_;
  ranks.divide_experts = divide_experts_;
  ranks.host = host_[index(rank)].get();
  ranks.communicator = nccl_.empty() ? ranks.host : nccl_[index(rank)].get();
  if (!sums_.empty()) ranks.sums = sums_[index(rank)].get();
  if (!links_.empty()) ranks.contexts = links_[index(rank)].get();
  ranks.timeout = timeout_;
  return ranks;
}

void RankLinks::abort(std::string_view reason) {
  host_[0]->abort(reason);
  for (const auto& sums : sums_) sums->stop();
  for (const auto& links : links_) links->stop();
  for (const auto& communicator : nccl_) {
    if (communicator != nullptr) communicator->abort(reason);
  }
}

std::string RankLinks::explain() const {
  if (nccl_.empty()) return "threads of this process";
  return fmt::format("threads of this process with a GPU each; sums over NCCL{}{}{}",
                     sums_.empty() ? "" : ", those of a few rows by writes into peers' memory",
                     links_.empty() ? "" : ", contexts by such writes, too",
                     why_no_sums_.empty() ? "" : fmt::format(" ({})", why_no_sums_));
}

}  // namespace fovea
