// SPDX-License-Identifier: Apache-2.0
// Times of calls that all ranks make at once.
#pragma once

#include <algorithm>
#include <vector>

#include "fovea/communicator.h"
#include "gpu/gpu.h"

namespace fovea::bench {

// Returns the time of one of many calls in a graph, in microseconds: a median over replays. `host`
// lets the ranks meet. A rank alone gets the communicator `self`.
template <typename Call>
double time_calls(Communicator& host, Stream stream, const Call& call) {
  constexpr int kCalls = 32, kReplays = 7;
  host.barrier();
  call();  // libraries load when a call first runs
  gpu::synchronize(stream);
  host.barrier();
  const gpu::Graph graph = gpu::Graph::capture(stream, [&](Stream) {
    for (int i = 0; i < kCalls; ++i) call();
  });
  std::vector<double> times;
  for (int replay = 0; replay < kReplays; ++replay) {
    gpu::Event begin, end;
    host.barrier();
    graph.launch(stream);  // the ranks begin the next one together
    begin.record(stream);
    graph.launch(stream);
    end.record(stream);
    end.wait();
    times.push_back(1e3 * end.milliseconds_since(begin) / kCalls);
  }
  host.barrier();
  std::ranges::nth_element(times, times.begin() + kReplays / 2);
  return times[kReplays / 2];
}

}  // namespace fovea::bench
