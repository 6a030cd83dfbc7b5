// SPDX-License-Identifier: Apache-2.0
// An engine whose model is distributed over ranks by tensor parallelism.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "fovea/api.h"
#include "fovea/communicator.h"
#include "fovea/engine.h"

namespace FOVEA_API fovea {

struct ParallelOptions;

// Ranks that are processes: each makes an object of its communicator (process_ranks.h), all of them
// together. Rank 0 then loads and uses engines, one at a time, and the others do so by follow().
class RankProcesses {
 public:
  // The communicator is one between processes, on the CPU; ranks on GPUs use NCCL besides.
  explicit RankProcesses(std::unique_ptr<Communicator> processes);
  // On rank 0: ends follow() on all others. No engine may be left.
  ~RankProcesses();
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  int rank() const;
  int size() const;
  // On other ranks than 0: does their part of all engines that rank 0 loads, until rank 0 ends.
  // `device` is this rank's; "cuda" is a GPU of its own among those of its machine. Throws
  // Error{device_failure} with the reason if a rank fails or leaves; if it is this one, the others
  // get the reason.
  void follow(const std::string& device);

 private:
  friend std::unique_ptr<Engine> load_parallel_engine(const EngineOptions&, const ParallelOptions&);
  std::unique_ptr<Engine> lead(const EngineOptions& options, const ParallelOptions& parallel);

  class Leader;
  const std::unique_ptr<Communicator> processes_;
  std::unique_ptr<Leader> leader_;  // on rank 0
};

struct ParallelOptions {
  // Ranks that share the model, in [1, 64]. Each holds a part of the heads, of the columns of MLPs
  // and experts, and of the vocabulary's logits; norms, routers and embeddings are on all.
  int32_t tensor_parallel = 1;
  // 1, or tensor_parallel: the tokens of each request are distributed over the ranks, too, in
  // layers whose attention allows it (why_not_context_parallel()); a token is then cached on one
  // rank instead of on all that hold its kv head. Layers with windows, chunks or recurrent states
  // stay divided by heads. page_size counts the tokens of a page on one rank.
  int32_t context_parallel = 1;
  // Each rank has whole experts, a tensor_parallel-th of every layer's, instead of some columns of
  // all. Models without experts are divided as usual.
  bool expert_parallel = false;
  // How ranks that are threads of this process communicate.
  ThreadCommunicatorOptions communicator = {};
  // Ranks that are processes, as many as tensor_parallel; this is rank 0. Must outlive the engine.
  // Null: the ranks are threads of this process.
  RankProcesses* processes = nullptr;
};

// Loads an engine whose ranks are threads of this process or processes, on the CPU or with a GPU
// each: those from options.device on, for processes that of RankProcesses::follow(). They map the
// same files, and each reads its own part of the matrices. All ranks schedule the same passes and
// draw the same tokens, so the text is that of one rank but for the rounding of sums. `threads` and
// `kv_memory_bytes` of the options are totals, which the ranks divide. On the CPU, generated
// weights (random_weights) are made whole on every rank. GPUs need NCCL (nccl_communicator.h).
//
// A rank that fails or does not come within the communicator's timeout ends the engine: this step()
// and all later ones throw Error{device_failure} with the reason. Processes use built-in backends
// only (EngineOptions::registry is null).
//
// Throws as Engine::load(), and Error{invalid_argument} for numbers of ranks by which the model's
// heads cannot be divided, and Error{unsupported} if there are fewer GPUs than ranks or no NCCL.
std::unique_ptr<Engine> load_parallel_engine(const EngineOptions& options,
                                             const ParallelOptions& parallel);

// Returns what load_parallel_engine() would do on the first rank, as Engine::plan() does; memory is
// that of the rank.
EnginePlan plan_parallel_engine(const EngineOptions& options, const ParallelOptions& parallel,
                                const std::optional<DeviceInfo>& device = {});

// Loads one rank of such an engine, for callers who lead all ranks themselves.
// Every rank calls this and then all functions of its engine alike, in the same order, with equal
// options and requests; each gets all events. `threads` and `kv_memory_bytes` are those of the
// rank; the latter must be given, because all ranks need the same caches. With share_contexts the
// ranks distribute contexts, as with ParallelOptions::context_parallel. `host`, which ranks on GPUs
// need to speculate by measured times, joins the same ranks on the CPU. divide_experts is
// ParallelOptions::expert_parallel. The communicators must outlive the engine. If a call throws on
// one rank only, abort the communicator: it fails all.
std::unique_ptr<Engine> load_engine_rank(const EngineOptions& options, Communicator& ranks,
                                         bool share_contexts, Communicator* host = nullptr,
                                         bool divide_experts = false);

}  // namespace fovea
