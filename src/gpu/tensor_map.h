// SPDX-License-Identifier: Apache-2.0
// Descriptions of tensors for bulk copies on Hopper and later.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace fovea::gpu {

// A tensor of 16-bit elements with up to 5 dimensions, innermost first. A copied box has rows of
// 128 bytes with the 128-byte swizzle in shared memory; elements outside of the tensor become zero.
struct TensorMapSpec {
  const void* data = nullptr;  // device memory, aligned to 16 bytes
  int rank = 4;
  std::array<uint64_t, 5> sizes{};    // in elements
  std::array<uint64_t, 4> strides{};  // in bytes, of dimensions 1 and up; multiples of 16
  std::array<uint32_t, 5> box{};      // in elements; box[0] is 64

  bool operator==(const TensorMapSpec&) const = default;
};

// Writes the driver's CUtensorMap to 128 bytes of host memory at `map`, aligned to 64 bytes.
// Kernels take it as part of their parameters. Throws Error{invalid_argument} if the driver refuses
// the description.
void encode_tensor_map(const TensorMapSpec& spec, void* map);

// A map that is encoded for every layer of a pass. If only the address has changed since the last
// call, the driver replaces just the address.
class RepeatedTensorMap {
 public:
  // Works as encode_tensor_map().
  void encode(const TensorMapSpec& spec, void* map);

 private:
  TensorMapSpec last_;  // data is null before the first call
  alignas(64) std::array<std::byte, 128> encoded_;
};

}  // namespace fovea::gpu
