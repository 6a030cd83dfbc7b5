// SPDX-License-Identifier: Apache-2.0
// Measures the limits of this machine at the time of the benchmark. Results are printed as
// fractions of them.
#pragma once

#include <cstddef>
#include <vector>

#include "fovea/thread_pool.h"
#include "kvcache/zeroed_memory.h"

namespace fovea::bench {

struct Ceilings {
  double flops = 0;       // f32 fused multiply-adds per second from registers, each counted as 2
  double read_bytes = 0;  // bytes per second streamed from memory by plain loads
};

// Samples the ceilings between samples of the benchmark, since the speed of a shared machine varies
// over time. Uses all threads of the pool.
class CeilingProbe {
 public:
  explicit CeilingProbe(ThreadPool& threads);
  Ceilings sample();

 private:
  double flops();
  double read_bytes();

  ThreadPool& threads_;
  ZeroedMemory memory_;
  size_t next_part_ = 0;
  std::vector<float> sinks_;
};

// Returns the best of five samples.
Ceilings measure_ceilings(ThreadPool& threads);

}  // namespace fovea::bench
