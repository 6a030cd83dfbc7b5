// SPDX-License-Identifier: Apache-2.0
// What this machine can do at most, measured here and now: every result is printed as a fraction of
// it.
#pragma once

#include <cstddef>
#include <vector>

#include "fovea/thread_pool.h"
#include "kvcache/zeroed_memory.h"

namespace fovea::bench {

struct Ceilings {
  double flops = 0;       // f32 fused multiply-adds per second from registers, counted as 2 each
  double read_bytes = 0;  // bytes per second streamed from memory, plain loads
};

// Samples of the ceilings, about 15 ms each, to be taken between those of what is compared with
// them: a shared host lends 30 GB/s in one second and 60 in another (2026-11-22). All threads of
// the pool work.
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

// The best of five samples.
Ceilings measure_ceilings(ThreadPool& threads);

}  // namespace fovea::bench
