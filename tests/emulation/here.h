// SPDX-License-Identifier: Apache-2.0
// Which thread of the emulated GPU runs at the moment. Only one does, whatever threads of the
// system carry them.
#pragma once

#include <cstdint>

#include "emulation/launch.h"

namespace fovea::emulation {

constexpr int kLanes = 32;
constexpr int kMaxThreads = 1024;  // of a block
constexpr int kPoisonByte = 0xff;

class Block;

struct Here {
  Index thread_index, block_index, block_size, grid_size;
  Block* block = nullptr;
  Run* run = nullptr;
};
inline Here here;

// Ends the process with the reason, and what every thread waits for.
[[noreturn]] void fail(const char* why);

}  // namespace fovea::emulation
