// SPDX-License-Identifier: Apache-2.0
// Descriptors of wgmma operands in shared memory: rows of 128 bytes with the 128-byte swizzle,
// groups of 8 rows `group_bytes` apart.
#pragma once

#include "kernels/cuda/common/types.cuh"

namespace fovea::kernels::cuda {

// Builds a descriptor; only its lower half varies.
__device__ __forceinline__ uint64_t operand_descriptor(uint32_t low, uint32_t group_bytes = 1024) {
  return static_cast<uint64_t>(1u << 30 | group_bytes >> 4) << 32 | low;
}
// Describes a tile whose rows run along the summed dimension, as q and K do. One product takes 32
// bytes of each row.
__device__ __forceinline__ uint64_t rows_descriptor(uint32_t address, uint32_t group_bytes = 1024) {
  return operand_descriptor(1u << 16 | (address & 0x3ffff) >> 4, group_bytes);
}
// Describes a tile in which each row is one step of the summed dimension, as V. Blocks of 64
// columns (16-bit elements) are `block_bytes` apart.
__device__ __forceinline__ uint64_t columns_descriptor(uint32_t address, uint32_t block_bytes,
                                                       uint32_t group_bytes = 1024) {
  return operand_descriptor(block_bytes >> 4 << 16 | (address & 0x3ffff) >> 4, group_bytes);
}
// Describes the same operand `bytes` further on.
__device__ __forceinline__ uint64_t moved(uint64_t descriptor, int bytes) {
  return operand_descriptor(static_cast<uint32_t>(descriptor) + bytes / 16);
}

}  // namespace fovea::kernels::cuda
