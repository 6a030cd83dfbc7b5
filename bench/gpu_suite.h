// SPDX-License-Identifier: Apache-2.0
// Times attention backends on a GPU: cold caches, verified output, fractions of the GPU's ceilings.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bench/gpu_cases.h"
#include "bench/gpu_ceilings.h"
#include "bench/gpu_peers.h"
#include "bench/gpu_workload.h"
#include "fovea/device.h"
#include "fovea/select_backend.h"

namespace fovea::bench {

struct GpuResult {
  GpuCase config;
  PowerState state = PowerState::burst;
  std::string refused;  // why nothing ran: no backend serves it, or it does not fit
  OutputError error;    // wrong output (error.problem) has no times
  std::string backend;
  GpuTime forward;           // one layer of a pass, keys already stored
  double eager_seconds = 0;  // the same enqueued call by call; 0: not taken, forward is long
  double host_seconds = 0;   // host time of one forward(), which only enqueues; 0 likewise
  double plan_seconds = 0;   // of plan() on the device
  double host_plan_seconds = 0;
  bool compute_bound = false;
  double ceiling_fraction = 0;  // of the ceiling that binds
  double floor_seconds = 0;
  std::vector<PeerTime> peers;

  bool timed() const { return refused.empty() && error.problem.empty(); }
};

// How long a process waits before its first result.
struct FirstCall {
  std::string config;
  double context_seconds = 0;  // driver start and the device's context
  double pack_seconds = 0;     // opening the kernel pack
  double create_seconds = 0;   // selection, backend, its kernels loaded, reserve
  double forward_seconds = 0;  // first plan and forward, finished
};

// One GPU set up to be measured: half of its free memory, at most 40 GB, is filled with noise and
// lent to the cases as caches.
class GpuBench {
 public:
  // Error{unsupported} without a GPU, Error{invalid_argument} when there is no such device.
  explicit GpuBench(int device);
  ~GpuBench();

  const DeviceInfo& device() const;
  GpuCeilings ceilings(PowerState state);
  // Call it before run(), with nothing loaded yet.
  FirstCall first_call(const GpuCase& config, const BackendWish& wish);
  // What cannot be served is a result that says why. Peers are left to the caller.
  GpuResult run(const GpuCase& config, const BackendWish& wish, PowerState state,
                const GpuCeilings& ceilings);

 private:
  struct Setup;
  std::unique_ptr<Setup> setup_;
};

}  // namespace fovea::bench
