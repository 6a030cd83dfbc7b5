// SPDX-License-Identifier: Apache-2.0
#include "gpu/tensor_map.h"

#include <fmt/ranges.h>

#include <cstring>

#include "core/check.h"
#include "gpu/driver.h"

namespace fovea::gpu {
namespace {

// Constants of the driver API.
constexpr int kDataTypeUint16 = 1;
constexpr int kInterleaveNone = 0;
constexpr int kSwizzle128Bytes = 3;
constexpr int kPromoteTo128Bytes = 2;
constexpr int kFillWithZeros = 0;

}  // namespace

void encode_tensor_map(const TensorMapSpec& spec, void* map) {
  const uint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult result = driver().tensor_map_encode(
      map, kDataTypeUint16, static_cast<uint32_t>(spec.rank), const_cast<void*>(spec.data),
      spec.sizes.data(), spec.strides.data(), spec.box.data(), steps, kInterleaveNone,
      kSwizzle128Bytes, kPromoteTo128Bytes, kFillWithZeros);
  check_argument(
      result == kCudaSuccess,
      "the driver refuses a tensor map at {} of rank {}, {} elements, strides {}, boxes {}",
      spec.data, spec.rank, fmt::join(spec.sizes, " x "), fmt::join(spec.strides, ", "),
      fmt::join(spec.box, " x "));
}

void RepeatedTensorMap::encode(const TensorMapSpec& spec, void* map) {
  if (spec != last_) {
    TensorMapSpec moved = last_;
    moved.data = spec.data;
    const bool patched = last_.data != nullptr && spec == moved &&
                         driver().tensor_map_replace_address(
                             encoded_.data(), const_cast<void*>(spec.data)) == kCudaSuccess;
    last_.data = nullptr;  // stays null if the driver refuses the map
    if (!patched) encode_tensor_map(spec, encoded_.data());
    last_ = spec;
  }
  std::memcpy(map, encoded_.data(), encoded_.size());
}

}  // namespace fovea::gpu
