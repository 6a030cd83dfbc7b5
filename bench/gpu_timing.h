// SPDX-License-Identifier: Apache-2.0
// How long GPU work takes: medians of CUDA events around work of 400 us and more, of graph replays
// below, where events and launches would weigh.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "fovea/device.h"

namespace fovea::bench {

// A GPU that has idled for a moment runs matrix work 10 to 17 % faster than one that has computed
// for a second. Compare like with like.
enum class PowerState {
  burst,      // 0.3 s idle before, then 30 ms of work
  sustained,  // 1.5 s of work without a gap
};
std::string_view power_state_name(PowerState state);

// Enqueues one call. `turn` counts up; work that rotates over n sets of buffers uses set turn % n.
using GpuWork = std::function<void(int32_t turn, Stream stream)>;

struct GpuTime {
  double seconds = 0;  // of one call, median
  double seconds_min = 0;
  int samples = 0;
  bool graph = false;  // timed as replays of a graph of many calls
};

// `sets` is how many turns pass until the same buffers come again. The work must be legal in a
// capture. Runs it a few times before it measures.
GpuTime time_on_gpu(const GpuWork& work, int32_t sets, PowerState state, Stream stream);

// Seconds of one call in a graph of many, as the GPU is found and for a few milliseconds: for small
// work whose time does not hang on the power state.
double graph_seconds(const GpuWork& work, Stream stream);

// The same between two events around many calls enqueued one by one.
double eager_seconds(const GpuWork& work, Stream stream);

// Host time of one call while the GPU has room in its queue, median.
double host_seconds(const GpuWork& work, Stream stream);

}  // namespace fovea::bench
