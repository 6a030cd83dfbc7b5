// SPDX-License-Identifier: Apache-2.0
#include "engine/process_rank.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>

#include "core/available_cores.h"
#include "core/check.h"
#include "engine/load_engine.h"
#include "engine/plan_engine.h"
#include "fovea/gpu.h"
#include "fovea/nccl_communicator.h"

namespace fovea {
namespace {

// Weights are read at different speeds, and a rank that has ended is noticed without a timeout.
constexpr std::chrono::milliseconds kLoading = std::chrono::hours(1);
constexpr std::chrono::milliseconds kRunning{10'000};

// The result of one rank, as bytes.
struct Outcome {
  int32_t failed = 0;
  ErrorCode code{};
  std::array<char, 2040> what{};
};

// Runs body on all ranks; throws the error of the first that threw, on all of them.
void agree(Communicator& ranks, const std::function<void()>& body) {
  Outcome own;
  const auto note = [&](ErrorCode code, std::string_view what) {
    own.failed = 1;
    own.code = code;
    what.copy(own.what.data(), own.what.size() - 1);
  };
  try {
    body();
  } catch (const Error& error) {
    note(error.code(), error.what());
  } catch (const std::bad_alloc&) {
    note(ErrorCode::out_of_memory, "out of memory while loading");
  }
  std::vector<Outcome> all(static_cast<size_t>(ranks.size()));
  ranks.all_gather(&own, all.data(), sizeof(own));
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].failed == 0) continue;
    if (rank == 0) throw Error(all[rank].code, all[rank].what.data());
    fail(all[rank].code, "rank {}: {}", rank, all[rank].what.data());
  }
}

// The ranks that share what this one has.
struct Neighbours {
  int before = 0;      // ranks below this one on its machine
  int on_machine = 1;  // with this one
  int on_cores = 1;    // likewise, of those that may use the same cores
};

Neighbours find_neighbours(Communicator& ranks) {
  struct Place {
    std::array<char, 256> machine{};
    cpu_set_t cores{};
  } own;
  gethostname(own.machine.data(), own.machine.size() / 2);
  std::string boot;  // machines may have equal names
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  boot.copy(own.machine.data() + own.machine.size() / 2, own.machine.size() / 2);
  sched_getaffinity(0, sizeof(own.cores), &own.cores);
  std::vector<Place> all(static_cast<size_t>(ranks.size()));
  ranks.all_gather(&own, all.data(), sizeof(own));
  Neighbours found{0, 0, 0};
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].machine != own.machine) continue;
    ++found.on_machine;
    found.before += static_cast<int>(rank) < ranks.rank();
    found.on_cores += CPU_EQUAL(&all[rank].cores, &own.cores) != 0;
  }
  return found;
}

// "cuda" is the GPU of this rank's place on its machine, or the only one that the process sees.
std::string device_of_rank(const std::string& device, const Neighbours& neighbours) {
  if (device != "cuda" || gpu_devices().size() == 1) return device;
  return fmt::format("cuda:{}", neighbours.before);
}

EngineOptions options_of_rank(const EngineOptions& options, const Communicator& ranks,
                              bool share_contexts, const Neighbours& neighbours) {
  EngineOptions own = options;
  const int size = ranks.size();
  own.device = device_of_rank(options.device, neighbours);
  own.threads = options.threads > 0 ? std::max(1, options.threads / size)
                                    : std::max(1, available_cores() / neighbours.on_cores);
  if (share_contexts) own.page_size *= size;
  if (options.kv_memory_bytes > 0) {
    own.kv_memory_bytes = std::max<size_t>(1, options.kv_memory_bytes / static_cast<size_t>(size));
  } else if (const DeviceInfo device = find_device(own.device); device.kind == DeviceKind::cpu) {
    own.kv_memory_bytes =
        free_memory(device.device()) / 2 / static_cast<size_t>(neighbours.on_machine);
  }
  return own;
}

// All ranks need the same caches.
void agree_on_memory(Communicator& ranks, size_t& bytes) {
  int64_t value = -static_cast<int64_t>(bytes);
  ranks.all_reduce(&value, &value, 1, DType::i64, ReduceOp::max);
  bytes = static_cast<size_t>(-value);
}

void agree_on_device(Communicator& ranks, DeviceKind own) {
  std::vector<DeviceKind> all(static_cast<size_t>(ranks.size()));
  ranks.all_gather(&own, all.data(), sizeof(own));
  const auto other = std::ranges::find_if(all, [&](DeviceKind kind) { return kind != all[0]; });
  check_argument(other == all.end(), "device of rank 0 is {}, of rank {} {}",
                 all[0] == DeviceKind::cpu ? "a CPU" : "a GPU", other - all.begin(),
                 all[0] == DeviceKind::cpu ? "a GPU" : "a CPU");
}

void join_gpus(Communicator& processes, Device device, ProcessRank& rank) {
  NcclId id;
  agree(processes, [&] {
    rank.context = std::make_unique<gpu::Context>(device.index);
    const NcclId own = make_nccl_id();  // says on all ranks if there is no NCCL
    if (processes.rank() == 0) id = own;
  });
  processes.broadcast(id.bytes.data(), id.bytes.size(), 0);
  rank.nccl = make_nccl_communicator(id, processes.rank(), processes.size(), device);
}

// Ranks on one machine write into each other's memory, if all of them can.
void join_memory(Communicator& processes, Device device, RankDivision division, ProcessRank& rank) {
  if (find_neighbours(processes).on_machine < processes.size()) {
    rank.why_no_sums = "the ranks are on several machines";
    return;
  }
  try {
    const int64_t values = max_values_of({}, processes.size());
    rank.sums = std::make_unique<RankSums>(
        make_process_inbox(processes, device.index, values, kRunning, rank.opened));
    if (!division.contexts) return;
    const int64_t words = ContextLinksOptions{}.max_bytes / int64_t{sizeof(uint32_t)};
    rank.contexts = std::make_unique<ContextLinks>(
        make_process_inbox(processes, device.index, words, kRunning, rank.opened));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::unsupported) throw;
    rank.sums.reset();
    rank.why_no_sums = error.what();
  }
}

// Returns the options of this rank, which all ranks have accepted.
EngineOptions agree_on_options(const EngineOptions& options, Communicator& processes,
                               RankDivision division) {
  EngineOptions own;
  const Neighbours neighbours = find_neighbours(processes);
  agree(processes, [&] {
    own = options_of_rank(options, processes, division.contexts, neighbours);
    (void)plan_rank(own, {}, {&processes, division.contexts, division.experts});
  });
  agree_on_device(processes, find_device(own.device).kind);
  agree_on_memory(processes, own.kv_memory_bytes);
  return own;
}

void load_agreed(const EngineOptions& options, Communicator& processes, RankDivision division,
                 ProcessRank& rank) {
  Communicator& model = rank.nccl != nullptr ? *rank.nccl : processes;
  ModelRanks ranks{&model, division.contexts, division.experts, &processes};
  ranks.sums = rank.sums.get();
  ranks.contexts = rank.contexts.get();
  rank.engine = load_engine(options, ranks);
  const EngineMemory memory = rank.engine->stats().memory;
  rank.memory.resize(static_cast<size_t>(processes.size()));
  processes.all_gather(&memory, rank.memory.data(), sizeof(memory));
}

// Lets calls wait for as long as loading takes.
class LongTimeout {
 public:
  explicit LongTimeout(Communicator& ranks) : ranks_(ranks) { ranks_.set_timeout(kLoading); }
  ~LongTimeout() { ranks_.set_timeout(kRunning); }
  LongTimeout(const LongTimeout&) = delete;
  LongTimeout& operator=(const LongTimeout&) = delete;

 private:
  Communicator& ranks_;
};

}  // namespace

ProcessRank::~ProcessRank() {
  engine.reset();
  if (context == nullptr) return;
  context->bind_to_free();
  if (!opened.empty()) {
    opened.clear();
    try {
      processes.barrier();  // nobody writes into memory that is freed now
    } catch (const Error&) {
      // The other ranks have failed.
    }
  }
  contexts.reset();
  sums.reset();
  nccl.reset();
}

std::unique_ptr<ProcessRank> load_process_rank(const EngineOptions& options,
                                               Communicator& processes, RankDivision division) {
  const LongTimeout timeout(processes);
  auto rank = std::make_unique<ProcessRank>(processes);
  const EngineOptions own = agree_on_options(options, processes, division);
  const Device device = find_device(own.device).device();
  try {
    if (device.kind != DeviceKind::cpu) {
      join_gpus(processes, device, *rank);
      join_memory(processes, device, division, *rank);
    }
    load_agreed(own, processes, division, *rank);
  } catch (const std::exception& error) {
    processes.abort(fmt::format("rank {} was not loaded: {}", processes.rank(), error.what()));
    throw;
  }
  return rank;
}

}  // namespace fovea
