// SPDX-License-Identifier: Apache-2.0
// The links between the ranks of one process: threads on the CPU, or threads with a GPU each.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "dist/context_links.h"
#include "dist/rank_sums.h"
#include "engine/rank_threads.h"
#include "fovea/communicator.h"
#include "fovea/parallel_engine.h"
#include "gpu/gpu.h"
#include "model/device.h"

namespace fovea {

class RankLinks {
 public:
  // Joins ranks on the CPU or, if `gpus` is not empty, on these GPUs, by NCCL, RankSums and, with
  // context_parallel, ContextLinks. The ranks' threads make NCCL's communicators. Throws as
  // make_nccl_communicator().
  RankLinks(RankThreads& threads, const std::vector<int>& gpus, const ParallelOptions& parallel);
  // NCCL's communicators end together.
  ~RankLinks();
  RankLinks(const RankLinks&) = delete;
  RankLinks& operator=(const RankLinks&) = delete;

  // Returns the rank's side, which refers to this object.
  ModelRanks of(int rank) const;
  // Fails all ranks; the first reason stays. May be called from any thread.
  void abort(std::string_view reason);
  // Throws the reason if they have failed.
  void check() { host_[0]->check(); }
  // How the ranks communicate, in words.
  std::string explain() const;

 private:
  RankThreads& threads_;
  bool share_contexts_, divide_experts_;
  std::chrono::milliseconds timeout_;
  std::vector<std::unique_ptr<gpu::Context>> contexts_;  // keep the GPUs' contexts alive
  std::vector<std::unique_ptr<Communicator>> host_;
  std::vector<std::unique_ptr<Communicator>> nccl_;   // empty on the CPU
  std::vector<std::unique_ptr<RankSums>> sums_;       // empty if the GPUs cannot
  std::vector<std::unique_ptr<ContextLinks>> links_;  // likewise
  std::string why_no_sums_;
};

}  // namespace fovea
