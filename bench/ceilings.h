// SPDX-License-Identifier: Apache-2.0
// What this machine can do at most, measured here and now: every result is printed as a fraction of
// it.
#pragma once

#include "fovea/thread_pool.h"

namespace fovea::bench {

struct Ceilings {
  double flops = 0;       // f32 fused multiply-adds per second from registers, counted as 2 each
  double read_bytes = 0;  // bytes per second streamed from memory, plain loads
};

// About a second. All threads of the pool work.
Ceilings measure_ceilings(ThreadPool& threads);

}  // namespace fovea::bench
