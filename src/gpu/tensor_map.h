// SPDX-License-Identifier: Apache-2.0
// Descriptions of tensors for the bulk copy engine of Hopper and later.
#pragma once

#include <array>
#include <cstdint>

namespace fovea::gpu {

// 16-bit elements of a tensor with up to 5 dimensions, innermost first. A box lands in shared
// memory as rows of 128 bytes with the 128-byte swizzle; elements outside of the tensor become
// zero.
struct TensorMapSpec {
  const void* data = nullptr;  // 16-byte aligned device memory
  int rank = 4;
  std::array<uint64_t, 5> sizes{};    // elements
  std::array<uint64_t, 4> strides{};  // bytes, of dimensions 1 and up; multiples of 16
  std::array<uint32_t, 5> box{};      // elements; box[0] is 64
};

// Writes the driver's CUtensorMap to 128 bytes of host memory at `map`, 64-byte aligned; a kernel
// takes them inside its parameters. Error{invalid_argument} when the driver refuses the
// description.
void encode_tensor_map(const TensorMapSpec& spec, void* map);

}  // namespace fovea::gpu
