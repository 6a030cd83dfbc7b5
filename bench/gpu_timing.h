// SPDX-License-Identifier: Apache-2.0
// Times GPU work. Long work is timed as medians of CUDA events around it. Short work is timed in
// graph replays, so that events and launches do not add to it.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "fovea/device.h"

namespace fovea::bench {

// A GPU that was idle for a moment runs at higher clocks than one that has computed for a second.
// Only times of the same state are comparable.
enum class PowerState {
  burst,      // short idle gap, then a short window of work
  sustained,  // long work without gaps
};
std::string_view power_state_name(PowerState state);

// Enqueues one call. `turn` counts up; work that rotates over n sets of buffers uses set turn % n.
using GpuWork = std::function<void(int32_t turn, Stream stream)>;

struct GpuTime {
  double seconds = 0;  // median of one call
  double seconds_min = 0;
  int samples = 0;
  bool graph = false;  // timed in replays of a graph with many calls
};

// `sets` is the number of turns until buffers repeat. The work must be legal in a capture. Runs the
// work several times before measuring.
GpuTime time_on_gpu(const GpuWork& work, int32_t sets, PowerState state, Stream stream);

// Returns seconds of one call in a graph of many. Takes only milliseconds and leaves the power
// state unchanged, so it suits small work that the state does not affect.
double graph_seconds(const GpuWork& work, Stream stream);

// Returns seconds of one call, between two events around many calls enqueued one by one.
double eager_seconds(const GpuWork& work, Stream stream);

// Returns the median host time of one call while the GPU's queue has room.
double host_seconds(const GpuWork& work, Stream stream);

}  // namespace fovea::bench
