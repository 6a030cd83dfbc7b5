// SPDX-License-Identifier: Apache-2.0
// Every rank is an engine of its own with a part of the model. All get the same calls in the same
// order, so they make the same decisions, and only their blocks and logits communicate.
#include "fovea/parallel_engine.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "core/available_cores.h"
#include "core/check.h"
#include "engine/generate.h"
#include "engine/load_engine.h"
#include "engine/plan_engine.h"
#include "engine/rank_engine.h"
#include "engine/rank_links.h"
#include "engine/rank_threads.h"
#include "fovea/gpu.h"

namespace fovea {
namespace {

constexpr int32_t kMaxRanks = 64;

class ParallelEngine final : public RankEngine {
 public:
  // gpus: those of the ranks, or empty.
  ParallelEngine(const EngineOptions& options, const ParallelOptions& parallel,
                 const std::vector<int>& gpus)
      : owns_weights_(options.random_weights.has_value() || !gpus.empty()),
        threads_(parallel.tensor_parallel, !gpus.empty()),
        links_(threads_, gpus, parallel),
        ranks_(index(parallel.tensor_parallel)) {
    load(options, gpus);
  }
  // A rank's objects go on its own thread. No pass is in flight outside of a call.
  ~ParallelEngine() override {
    threads_.run([this](int rank) { ranks_[index(rank)].reset(); });
  }

  int64_t add(const GenerateRequest& request) override {
    throw_if_failed();
    const int64_t id = first().add(request);
    note_added(id);
    on_others("add", [&](Engine& rank) {
      const int64_t other = rank.add(request);
      if (other != id) fail(ErrorCode::device_failure, "request {} has id {}", id, other);
    });
    return id;
  }
  void cancel(int64_t request) override {
    if (cancel_after_failure(request)) return;
    first().cancel(request);
    on_others("cancel", [&](Engine& rank) { rank.cancel(request); });
  }

  std::vector<TokenEvent> step() override {
    if (failure_ && !events_.empty()) return take_events();
    throw_if_failed();
    std::vector<std::vector<TokenEvent>> events(ranks_.size());
    run("step", [&](int rank) { events[index(rank)] = ranks_[index(rank)]->step(); });
    for (size_t rank = 1; rank < ranks_.size(); ++rank) {
      if (!same_tokens(events[0], events[rank])) {
        fail_engine(fmt::format("step: ranks 0 and {} drew other tokens", rank));
        throw_if_failed();
      }
    }
    return take_events(std::move(events[0]));
  }

  void clear_prefix_cache() override {
    for (const auto& rank : ranks_) rank->clear_prefix_cache();
  }

  std::vector<GenerateResult> generate(std::span<const GenerateRequest> requests,
                                       const std::function<void(const TokenEvent&)>& on_token,
                                       const std::function<bool()>& stop) override {
    return generate_by_steps({*this, next_id_, events_}, requests, on_token, stop);
  }

  std::vector<float> logits(std::span<const int32_t> tokens) override {
    throw_if_failed();
    std::vector<float> result;
    run("logits", [&](int rank) {
      std::vector<float> own = ranks_[index(rank)]->logits(tokens);
      if (rank == 0) result = std::move(own);
    });
    return result;
  }

  // Memory is that of all ranks together; weights of files are mapped once on the CPU.
  const EngineStats& stats() const override {
    stats_ = first().stats();
    for (size_t rank = 1; rank < ranks_.size(); ++rank) {
      add_memory(stats_.memory, ranks_[rank]->stats().memory, owns_weights_);
    }
    return stats_;
  }
  std::vector<StepRecord> take_step_records() override {
    for (size_t rank = 1; rank < ranks_.size(); ++rank) (void)ranks_[rank]->take_step_records();
    return first().take_step_records();
  }
  std::string explain() const override {
    return fmt::format("tensor parallelism over {} ranks, {}; each has:\n{}", ranks_.size(),
                       links_.explain(), first().explain());
  }

 private:
  // Throws what the rank threw that failed first: the others may only say that it failed.
  void load(const EngineOptions& options, const std::vector<int>& gpus) {
    std::once_flag once;
    std::exception_ptr first;
    try {
      threads_.run([&](int rank) {
        EngineOptions own = options;
        if (!gpus.empty()) own.device = fmt::format("cuda:{}", gpus[index(rank)]);
        try {
          ranks_[index(rank)] = load_engine(own, links_.of(rank));
        } catch (const std::exception& error) {
          std::call_once(once, [&] { first = std::current_exception(); });
          links_.abort(error.what());
          throw;
        }
      });
    } catch (...) {
      if (first) std::rethrow_exception(first);
      throw;
    }
  }

  static size_t index(int rank) { return static_cast<size_t>(rank); }
  Engine& first() const override { return *ranks_[0]; }
  static bool same_tokens(std::span<const TokenEvent> a, std::span<const TokenEvent> b) {
    return std::ranges::equal(a, b, [](const TokenEvent& x, const TokenEvent& y) {
      return x.request == y.request && x.token == y.token && x.finish == y.finish;
    });
  }

  void fail_engine(std::string reason) {
    links_.abort(reason);
    if (!failure_) failure_ = std::move(reason);
  }

  // Runs body(rank) on all ranks at once. One that throws ends the others' waits and the engine.
  template <typename Body>
  void run(std::string_view call, const Body& body) {
    try {
      threads_.run([&](int rank) {
        try {
          body(rank);
        } catch (const std::exception& error) {
          links_.abort(fmt::format("{}: rank {} failed: {}", call, rank, error.what()));
          throw;
        }
      });
    } catch (const std::exception& error) {
      fail_engine(fmt::format("{}: {}", call, error.what()));
      name_first_failure();
      throw_if_failed();
    }
  }
  // The communicator keeps the reason that came first, of whichever rank.
  void name_first_failure() {
    try {
      links_.check();
    } catch (const Error& error) {
      failure_ = error.what();
    }
  }

  // Calls that do not communicate.
  template <typename Body>
  void on_others(std::string_view call, const Body& body) {
    for (size_t rank = 1; rank < ranks_.size(); ++rank) {
      try {
        body(*ranks_[rank]);
      } catch (const std::exception& error) {
        fail_engine(fmt::format("{}: rank {} failed: {}", call, rank, error.what()));
        throw_if_failed();
      }
    }
  }

  const bool owns_weights_;
  RankThreads threads_;
  RankLinks links_;
  std::vector<std::unique_ptr<Engine>> ranks_;
  mutable EngineStats stats_;
};

void check_parallel(const EngineOptions& options, const ParallelOptions& parallel) {
  const int32_t ranks = parallel.tensor_parallel, contexts = parallel.context_parallel;
  check_argument(ranks >= 1 && ranks <= kMaxRanks, "tensor_parallel is {}, must be in [1, {}]",
                 ranks, kMaxRanks);
  check_argument(contexts == 1 || contexts == ranks,
                 "context_parallel is {}, must be 1 or as tensor_parallel, {}", contexts, ranks);
  if (parallel.processes != nullptr) {
    const int processes = parallel.processes->size();
    check_argument(ranks == processes, "tensor_parallel is {}, but there are {} processes", ranks,
                   processes);
  }
  check_engine_options(options);
}

// The ranks divide threads and memory. Without a budget, ranks on GPUs agree on half of what the
// fullest one has free.
EngineOptions options_of_rank(const EngineOptions& options, const ParallelOptions& parallel,
                              const DeviceInfo& device) {
  EngineOptions of_rank = options;
  const int ranks = parallel.tensor_parallel;
  const int threads = options.threads > 0 ? options.threads : available_cores();
  of_rank.threads = std::max(1, threads / ranks);
  of_rank.page_size *= parallel.context_parallel;
  size_t budget = options.kv_memory_bytes;
  if (budget == 0 && device.kind == DeviceKind::cpu) budget = free_memory(device.device()) / 2;
  if (budget > 0) {
    of_rank.kv_memory_bytes = std::max<size_t>(1, budget / static_cast<size_t>(ranks));
  }
  return of_rank;
}

// Returns the GPU of each rank, from `device` on; empty for the CPU.
std::vector<int> gpus_of(const DeviceInfo& device, int ranks) {
  std::vector<int> gpus;
  if (device.kind == DeviceKind::cpu) return gpus;
  const auto there = static_cast<int>(gpu_devices().size());
  if (device.index + ranks > there) {
    fail(ErrorCode::unsupported,
         "tensor_parallel is {}, but from GPU {} on there are {}: each rank needs one of its own",
         ranks, device.index, there - device.index);
  }
  for (int rank = 0; rank < ranks; ++rank) gpus.push_back(device.index + rank);
  return gpus;
}

}  // namespace

std::unique_ptr<Engine> load_engine_rank(const EngineOptions& options, Communicator& ranks,
                                         bool share_contexts, Communicator* host,
                                         bool divide_experts) {
  check_engine_options(options);
  const DeviceInfo device = find_device(options.device);
  check_argument(ranks.device() == device.kind, "device is {}, but the ranks communicate on {}",
                 options.device, ranks.device() == DeviceKind::cpu ? "the CPU" : "GPUs");
  const bool measures = !options.speculate.empty() && !options.always_speculate;
  if (device.kind != DeviceKind::cpu && ranks.size() > 1 && measures && host == nullptr) {
    fail(ErrorCode::unsupported,
         "speculate is {}: ranks without a communicator of the host do not share their measured "
         "times; set always_speculate",
         options.speculate);
  }
  check_argument(options.kv_memory_bytes > 0,
                 "kv_memory_bytes is 0, must be given: all ranks need the same caches");
  EngineOptions of_rank = options;
  if (share_contexts) of_rank.page_size *= ranks.size();
  return load_engine(of_rank, {&ranks, share_contexts, divide_experts, host});
}

std::unique_ptr<Engine> load_parallel_engine(const EngineOptions& options,
                                             const ParallelOptions& parallel) {
  check_parallel(options, parallel);
  if (parallel.processes != nullptr) {
    return parallel.processes->lead(options, parallel);
  }
  const DeviceInfo device = find_device(options.device);
  if (parallel.tensor_parallel == 1) return Engine::load(options);
  const std::vector<int> gpus = gpus_of(device, parallel.tensor_parallel);
  return std::make_unique<ParallelEngine>(options_of_rank(options, parallel, device), parallel,
                                          gpus);
}

EnginePlan plan_parallel_engine(const EngineOptions& options, const ParallelOptions& parallel,
                                const std::optional<DeviceInfo>& wanted) {
  check_parallel(options, parallel);
  if (parallel.tensor_parallel == 1) return Engine::plan(options, wanted);
  const DeviceInfo device = wanted ? *wanted : find_device(options.device);
  if (!wanted) (void)gpus_of(device, parallel.tensor_parallel);
  const auto ranks = make_thread_communicators(parallel.tensor_parallel);
  return plan_rank(options_of_rank(options, parallel, device), wanted,
                   {ranks[0].get(), parallel.context_parallel > 1, parallel.expert_parallel});
}

}  // namespace fovea
