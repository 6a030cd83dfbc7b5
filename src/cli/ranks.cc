// SPDX-License-Identifier: Apache-2.0
#include "cli/ranks.h"

#include <fmt/core.h>

#include <csignal>

#include "cli/commands.h"
#include "fovea/error.h"
#include "fovea/process_ranks.h"

namespace fovea::cli {
namespace {

std::unique_ptr<Communicator> meet(const RankFlags& flags) {
  const int ranks = flags.parallel.tensor_parallel;
  const int started = mpi_process_count();
  if (!flags.rendezvous.empty()) {
    if (flags.rank < 0 || flags.rank >= ranks) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("--rank is {}, must be in [0, {}) with --rendezvous and --tp {}",
                              flags.rank, ranks, ranks));
    }
    show_progress("waiting for the other ranks");
    const std::chrono::duration<double> timeout(flags.meeting_seconds);
    return meet_by_file({.file = flags.rendezvous,
                         .rank = flags.rank,
                         .ranks = ranks,
                         .meeting_timeout = std::chrono::ceil<std::chrono::milliseconds>(timeout)});
  }
  if (flags.rank >= 0) throw Error(ErrorCode::invalid_argument, "--rank needs --rendezvous");
  if (ranks == 1 || started <= 1) return nullptr;
  if (started != ranks) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("--tp is {}, but mpiexec has started {} processes", ranks, started));
  }
  return meet_by_mpi();
}

}  // namespace

void add_tensor_parallel(CLI::App& command, ParallelOptions& options) {
  command
      .add_option("--tp", options.tensor_parallel,
                  "ranks that share the model, each with a GPU or on the CPU; threads of this "
                  "process, or the processes of mpiexec or --rendezvous")
      ->capture_default_str();
  command
      .add_option("--dcp", options.context_parallel,
                  "ranks that distribute the tokens of a request, too: 1, or as --tp")
      ->capture_default_str();
  command.add_flag("--expert-parallel", options.expert_parallel,
                   "each rank has whole experts instead of some columns of all");
}

void add_rank_flags(CLI::App& command, RankFlags& flags) {
  add_tensor_parallel(command, flags.parallel);
  command.add_option("--rendezvous", flags.rendezvous,
                     "file by which the processes of --tp find each other over TCP, on a file "
                     "system that they share; one command for each --rank");
  command.add_option("--rank", flags.rank,
                     "with --rendezvous: the rank of this process; rank 0 has all output");
  command
      .add_option("--rendezvous-timeout", flags.meeting_seconds,
                  "seconds in which all ranks must come")
      ->capture_default_str()
      ->check(CLI::Range(0.1, 1e6));
}

Ranks::Ranks(const RankFlags& flags) : options_(flags.parallel) {
  std::unique_ptr<Communicator> met = meet(flags);
  clear_progress();
  if (met == nullptr) return;
  processes_ = std::make_unique<RankProcesses>(std::move(met));
  options_.processes = processes_.get();
}

bool Ranks::follow(const std::string& device) {
  if (processes_ == nullptr || processes_->rank() == 0) return false;
  // A terminal sends Ctrl-C to all ranks; rank 0 ends the others.
  std::signal(SIGINT, SIG_IGN);
  std::signal(SIGTERM, SIG_IGN);
  processes_->follow(device);
  return true;
}

}  // namespace fovea::cli
