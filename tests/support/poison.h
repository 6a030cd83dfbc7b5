// SPDX-License-Identifier: Apache-2.0
// Memory filled so that reads of unowned bytes show: NaN in every float format, wild indices.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace fovea::test {

// The contents of memory that was not written.
enum class Fill : uint8_t { zero, poison };

inline constexpr uint8_t kPoisonByte = 0xff;  // NaN as fp32, fp16, bf16, e4m3 and e5m2

inline int fill_byte(Fill fill) { return fill == Fill::poison ? kPoisonByte : 0; }

// Returns the index-th entry of an integer array that must not be read.
inline int32_t wild_index(size_t index) {
  constexpr std::array<int32_t, 4> kWild = {-1, std::numeric_limits<int32_t>::min(),
                                            std::numeric_limits<int32_t>::max(), 2147480000};
  return kWild[index % kWild.size()];
}

inline std::vector<int32_t> index_array(size_t size, Fill fill) {
  std::vector<int32_t> array(size, 0);
  if (fill == Fill::poison) {
    for (size_t i = 0; i < size; ++i) array[i] = wild_index(i);
  }
  return array;
}

// Exactly `size` bytes, 64-byte aligned, between two guard zones that must not be written.
class GuardedBuffer {
 public:
  GuardedBuffer(size_t size, Fill fill) : memory_(size + 2 * kGuard + kAlignment), size_(size) {
    std::fill(memory_.begin(), memory_.end(), kGuardByte);
    const auto address = reinterpret_cast<uintptr_t>(memory_.data()) + kGuard;
    begin_ = kGuard + (kAlignment - address % kAlignment) % kAlignment;
    std::fill_n(memory_.begin() + begin_, size, static_cast<std::byte>(fill_byte(fill)));
  }

  std::span<std::byte> bytes() { return {memory_.data() + begin_, size_}; }

  ::testing::AssertionResult guards_intact() const {
    const auto written = [](std::byte byte) { return byte != kGuardByte; };
    const auto front_end = memory_.begin() + static_cast<int64_t>(begin_);
    const auto back_begin = front_end + static_cast<int64_t>(size_);
    auto at = std::find_if(memory_.begin(), front_end, written);
    if (at == front_end) at = std::find_if(back_begin, memory_.end(), written);
    if (at != memory_.end()) {
      return ::testing::AssertionFailure()
             << "byte " << at - front_end << " of a buffer of " << size_ << " was written";
    }
    return ::testing::AssertionSuccess();
  }

 private:
  static constexpr size_t kGuard = 4096;
  static constexpr size_t kAlignment = 64;
  static constexpr std::byte kGuardByte{0xa5};

  std::vector<std::byte> memory_;
  size_t size_;
  size_t begin_ = 0;
};

}  // namespace fovea::test
