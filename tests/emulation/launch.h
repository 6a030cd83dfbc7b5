// SPDX-License-Identifier: Apache-2.0
// The interface between the emulated driver and a kernel's library.
#pragma once

#include <cstdint>
#include <functional>

namespace fovea::emulation {

struct Index {
  uint32_t x = 0, y = 0, z = 0;
};

// Choices that a GPU leaves open.
struct Policy {
  bool descending = false;     // order of threads, blocks and copies
  bool late_products = false;  // wgmma reads its operands when a thread waits for it
  enum { early, late, mixed } copies = early;
  // Threads that arrive at an mbarrier, or count in memory, continue after all others.
  bool arrivals_yield = false;
};

struct Launch {
  Index grid;
  uint32_t cluster = 1;          // blocks along x
  uint32_t multiprocessors = 1;  // kBlocksPerSm blocks are resident on each
  Policy policy;
  std::function<void()> finish_previous;  // the preceding launch, if this one overlaps with it
};

class Run;

// Exported by each library. `launch` returns null, or a run to finish later: all that the next
// kernel waits for before it starts has happened.
using LaunchFunction = Run*(const Launch&, const void* params);
using FinishFunction = void(Run*);

}  // namespace fovea::emulation
