// SPDX-License-Identifier: Apache-2.0
// Descriptions of tensors for the bulk copy engine of Hopper and later.
#pragma once

#include <array>
#include <cstddef>
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

  bool operator==(const TensorMapSpec&) const = default;
};

// Writes the driver's CUtensorMap to 128 bytes of host memory at `map`, 64-byte aligned; a kernel
// takes them inside its parameters. Error{invalid_argument} when the driver refuses the
// description.
void encode_tensor_map(const TensorMapSpec& spec, void* map);

// A map that every layer of a pass needs anew: where only the address is another one than last time
// the driver puts that into the map it has encoded.
class RepeatedTensorMap {
 public:
  // As encode_tensor_map().
  void encode(const TensorMapSpec& spec, void* map);

 private:
  TensorMapSpec last_;  // data null: none yet
  alignas(64) std::array<std::byte, 128> encoded_;
};

}  // namespace fovea::gpu
