// SPDX-License-Identifier: Apache-2.0
// The emulated driver's contents of a CUtensorMap, and copies of its boxes.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

namespace fovea::emulation {

// A map of 16-bit elements, innermost dimension first. A box consists of rows of 128 bytes with the
// 128-byte swizzle.
struct EncodedTensorMap {
  static constexpr uint64_t kTag = 0x70616d726f736e65;
  static constexpr int kMaxRank = 5;
  static constexpr uint64_t kRowBytes = 128;
  static constexpr uint64_t kElementBytes = 2;

  uint64_t tag;
  char* data;
  uint32_t rank;
  std::array<uint32_t, kMaxRank> box;
  std::array<uint64_t, kMaxRank> sizes;
  std::array<uint64_t, kMaxRank - 1> strides;  // bytes

  // Returns whether the driver accepts the map.
  bool is_valid() const {
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0 || rank < 1 || rank > kMaxRank) return false;
    if (box[0] * kElementBytes != kRowBytes) return false;
    for (uint32_t i = 0; i < rank; ++i) {
      if (sizes[i] == 0 || sizes[i] > uint64_t{1} << 32) return false;
      if (box[i] == 0 || box[i] > 256) return false;
      if (i > 0 && (strides[i - 1] % 16 != 0 || strides[i - 1] >= uint64_t{1} << 40)) return false;
    }
    return true;
  }
  uint32_t box_bytes() const {
    uint64_t bytes = kElementBytes;
    for (uint32_t i = 0; i < rank; ++i) bytes *= box[i];
    return static_cast<uint32_t>(bytes);
  }

  using Coordinates = std::array<int, kMaxRank>;

  // Visits each 16 bytes of the box at `at`: their offset in the box before the swizzle, their
  // address in memory (null outside of the tensor), and the number of bytes within the tensor.
  template <typename Visit>
  void for_each_chunk(const Coordinates& at, Visit&& visit) const {
    const uint32_t rows = box_bytes() / kRowBytes;
    for (uint32_t row = 0; row < rows; ++row) {
      uint32_t rest = row;
      bool inside = true;
      char* from = data;
      for (uint32_t i = 1; i < rank; ++i) {
        const int64_t place = int64_t{at[i]} + rest % box[i];
        rest /= box[i];
        inside &= place >= 0 && place < static_cast<int64_t>(sizes[i]);
        if (inside) from += place * static_cast<int64_t>(strides[i - 1]);
      }
      constexpr int kChunkElements = 8;
      for (int chunk = 0; chunk < static_cast<int>(kRowBytes) / 16; ++chunk) {
        const int64_t column = int64_t{at[0]} + chunk * kChunkElements;
        int64_t live = inside && column >= 0 ? static_cast<int64_t>(sizes[0]) - column : 0;
        live = live < 0 ? 0 : live > kChunkElements ? kChunkElements : live;
        visit(row * kRowBytes + static_cast<uint32_t>(chunk) * 16,
              live > 0 ? from + column * static_cast<int64_t>(kElementBytes) : nullptr,
              static_cast<size_t>(live) * kElementBytes);
      }
    }
  }
  // Swizzles an address of shared memory: the chunks of 16 bytes in each 128 change places.
  static uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }
};
static_assert(sizeof(EncodedTensorMap) <= 128);

}  // namespace fovea::emulation
