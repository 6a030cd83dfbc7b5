// SPDX-License-Identifier: Apache-2.0
// One rank of an engine whose ranks are processes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "dist/context_links.h"
#include "dist/rank_sums.h"
#include "fovea/communicator.h"
#include "fovea/engine.h"
#include "gpu/gpu.h"

namespace fovea {

// The parts of a model that ranks divide in another way.
struct RankDivision {
  bool contexts = false, experts = false;
};

struct ProcessRank {
  Communicator& processes;
  // On a GPU: keeps its context alive, and joins the ranks.
  std::unique_ptr<gpu::Context> context;
  std::unique_ptr<Communicator> nccl;
  // If all ranks are on one machine: they write into each other's memory.
  std::vector<gpu::OpenedMemory> opened;
  std::unique_ptr<RankSums> sums;
  std::unique_ptr<ContextLinks> contexts;
  std::string why_no_sums;  // empty: there are, or the ranks are on CPUs
  std::unique_ptr<Engine> engine;
  std::vector<EngineMemory> memory;  // after loading, of all ranks

  explicit ProcessRank(Communicator& ranks) : processes(ranks) {}
  ~ProcessRank();
  ProcessRank(const ProcessRank&) = delete;
  ProcessRank& operator=(const ProcessRank&) = delete;
};

// Loads this process's rank; all ranks call it together, with options that are equal but for the
// device. The communicator, which must outlive the rank, is one on the CPU. If one rank refuses the
// options, all throw its error and may go on; a rank that fails later fails the communicator.
std::unique_ptr<ProcessRank> load_process_rank(const EngineOptions& options,
                                               Communicator& processes, RankDivision division);

}  // namespace fovea
