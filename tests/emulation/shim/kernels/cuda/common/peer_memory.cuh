// SPDX-License-Identifier: Apache-2.0
// Replaces src/kernels/cuda/common/peer_memory.cuh. Only one thread runs at a time.
#pragma once

#include "emulation/cuda.h"

namespace fovea::kernels::cuda {

inline uint32_t load_shared_word(const uint32_t* from) { return *from; }
inline void store_shared_word(uint32_t* to, uint32_t value) { *to = value; }
inline void store_shared_quad(uint32_t* to, const uint4& quad) {
  to[0] = quad.x;
  to[1] = quad.y;
  to[2] = quad.z;
  to[3] = quad.w;
}
inline uint4 load_shared_quad(const uint32_t* from) { return {from[0], from[1], from[2], from[3]}; }

// A millisecond passes between two questions.
inline int64_t global_nanoseconds() {
  static int64_t now = 0;
  return now += 1'000'000;
}

}  // namespace fovea::kernels::cuda
