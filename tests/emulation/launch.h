// SPDX-License-Identifier: Apache-2.0
// What the emulated driver tells a kernel's library.
#pragma once

#include <cstdint>
#include <functional>

namespace fovea::emulation {

struct Index {
  uint32_t x = 0, y = 0, z = 0;
};

// What a GPU leaves open.
struct Policy {
  bool descending = false;     // threads, blocks and copies take turns in this order
  bool late_products = false;  // wgmma reads its operands when somebody waits for it
  enum { early, late, mixed } copies = early;
  // Who arrives at an mbarrier or counts in memory goes on as the last.
  bool arrivals_yield = false;
};

struct Launch {
  Index grid;
  uint32_t cluster = 1;          // blocks along x
  uint32_t multiprocessors = 1;  // that is how many times kBlocksPerSm blocks are alive
  Policy policy;
  std::function<void()> finish_previous;  // the launch before, if this one overlaps with it
};

class Run;

// Exported by each library. `launch` returns null, or what is to be finished: all that the next
// kernel waits for before it may start has happened.
using LaunchFunction = Run*(const Launch&, const void* params);
using FinishFunction = void(Run*);

}  // namespace fovea::emulation
