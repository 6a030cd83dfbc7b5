// SPDX-License-Identifier: Apache-2.0
// The flags of commands whose model can be on several ranks, and the processes that are such ranks.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "fovea/parallel_engine.h"

namespace fovea::cli {

struct RankFlags {
  ParallelOptions parallel;
  int rank = -1;
  std::string rendezvous;
  double meeting_seconds = 120;
};
void add_tensor_parallel(CLI::App& command, ParallelOptions& options);
void add_rank_flags(CLI::App& command, RankFlags& flags);

// The processes of a command, if its ranks are processes: those that mpiexec has started, or those
// that meet by --rendezvous.
class Ranks {
 public:
  // Waits for the others.
  explicit Ranks(const RankFlags& flags);

  // Returns false on rank 0, which runs the command. Otherwise does its part until rank 0 ends, and
  // returns true.
  bool follow(const std::string& device);
  const ParallelOptions& options() const { return options_; }
  // Lets the other processes end; no engine may be left.
  void end() { processes_.reset(); }

 private:
  ParallelOptions options_;
  std::unique_ptr<RankProcesses> processes_;
};

}  // namespace fovea::cli
