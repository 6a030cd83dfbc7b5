// SPDX-License-Identifier: Apache-2.0
// Times attention backends on a GPU with cold caches, verifies the output, and relates results to
// the GPU's ceilings.
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
  // Reason why nothing ran: no backend supports the case, or memory does not suffice.
  std::string refused;
  OutputError error;  // no times are measured if error.problem is set
  std::string backend;
  GpuTime forward;  // one layer of a pass, with keys already stored
  // The same, enqueued call by call; 0 if not measured because forward is long.
  double eager_seconds = 0;
  double host_seconds = 0;  // host time of one forward(), which only enqueues; 0 if not measured
  double plan_seconds = 0;  // device time of plan()
  double host_plan_seconds = 0;
  bool compute_bound = false;
  double ceiling_fraction = 0;  // fraction of the binding ceiling
  double floor_seconds = 0;
  std::vector<PeerTime> peers;

  bool timed() const { return refused.empty() && error.problem.empty(); }
};

// The time until a process gets its first result.
struct FirstCall {
  std::string config;
  double context_seconds = 0;  // driver start and the device's context
  double pack_seconds = 0;     // opens the kernel pack
  double create_seconds = 0;   // selects and creates the backend, loads kernels, reserves
  double forward_seconds = 0;  // runs the first plan and forward to completion
};

// A GPU prepared for measurements. Half of its free memory, at most 40 GB, is filled with noise and
// serves as caches of the cases.
class GpuBench {
 public:
  // Throws Error{unsupported} without a GPU, and Error{invalid_argument} if there is no such
  // device.
  explicit GpuBench(int device);
  ~GpuBench();

  const DeviceInfo& device() const;
  GpuCeilings ceilings(PowerState state);
  // Must be called before run(), while no kernels are loaded.
  FirstCall first_call(const GpuCase& config, const BackendWish& wish);
  // An unsupported case gives a result with the reason. The caller adds peers.
  GpuResult run(const GpuCase& config, const BackendWish& wish, PowerState state,
                const GpuCeilings& ceilings);

 private:
  struct Setup;
  std::unique_ptr<Setup> setup_;
};

}  // namespace fovea::bench
