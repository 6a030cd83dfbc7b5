// SPDX-License-Identifier: Apache-2.0
// The thread of the emulated GPU that runs now. Only one runs at a time, on any thread of the
// system.
#pragma once

#include <cstdint>

#include "emulation/launch.h"

namespace fovea::emulation {

constexpr int kLanes = 32;
constexpr int kMaxThreads = 1024;  // per block
constexpr int kPoisonByte = 0xff;

class Block;

struct Here {
  Index thread_index, block_index, block_size, grid_size;
  Block* block = nullptr;
  Run* run = nullptr;
};
inline Here here;

// Ends the process and prints the reason, and what every thread waits for.
[[noreturn]] void fail(const char* why);

}  // namespace fovea::emulation
