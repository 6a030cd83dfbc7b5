// SPDX-License-Identifier: Apache-2.0
// Wrong values for the fuzzer of the C interface, chosen by bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "fovea/fovea.h"

namespace fovea::test {

class FuzzBytes {
 public:
  explicit FuzzBytes(std::span<const uint8_t> data) : data_(data) {}
  bool empty() const { return at_ >= data_.size(); }
  uint8_t next() { return empty() ? 0 : data_[at_++]; }
  uint32_t next_word() { return next() | next() << 8 | next() << 16 | uint32_t{next()} << 24; }
  template <typename T, size_t n>
  T pick(const T (&values)[n]) {
    return values[next() % n];
  }

 private:
  std::span<const uint8_t> data_;
  size_t at_ = 0;
};

// Values that are at or beyond limits.
inline constexpr int32_t kInts[] = {
    0,  1,   2,   3,   4,     5,  8,  16,        31,        32,
    64, 255, 256, 300, 65536, -1, -2, INT32_MAX, INT32_MIN, INT32_MAX - 1};
inline constexpr int64_t kExtents[] = {0,
                                       1,
                                       2,
                                       3,
                                       4,
                                       5,
                                       16,
                                       32,
                                       -1,
                                       INT64_MIN,
                                       INT64_MAX,
                                       int64_t{1} << 31,
                                       int64_t{1} << 47,
                                       int64_t{1} << 62};
// Either inside the regions of the world's arrays or beyond all memory.
inline constexpr int64_t kStrides[] = {0,
                                       1,
                                       2,
                                       4,
                                       16,
                                       32,
                                       64,
                                       128,
                                       -1,
                                       -32,
                                       INT64_MIN,
                                       INT64_MAX,
                                       int64_t{1} << 62,
                                       -(int64_t{1} << 62)};
inline constexpr uint64_t kOffsets[] = {
    0, 1, 2, 4, 8, 64, uint64_t{1} << 48, uint64_t{1} << 63, UINT64_MAX};
inline constexpr DLDataType kTypes[] = {{kDLFloat, 32, 1}, {kDLFloat, 16, 1}, {kDLBfloat, 16, 1},
                                        {kDLInt, 32, 1},   {kDLInt, 64, 1},   {kDLUInt, 8, 1},
                                        {kDLInt, 0, 1},    {kDLFloat, 32, 4}, {200, 77, 9}};
inline constexpr uint32_t kSizes[] = {0,  1,   4,   8,   16,  24,   40,   64,
                                      72, 100, 128, 256, 512, 4096, 4104, UINT32_MAX};

// A struct of the caller, with memory for every size that is accepted.
template <typename S>
class Sized {
 public:
  explicit Sized(const S& value) : memory_(8192 / sizeof(uint64_t)) {
    std::memcpy(memory_.data(), &value, sizeof value);
  }
  S* get() { return reinterpret_cast<S*>(memory_.data()); }
  // Sets another size, and sometimes a byte of a field, or one behind the known ones.
  void mutate(FuzzBytes& bytes) {
    if (bytes.next() % 4 == 0) get()->struct_size = bytes.pick(kSizes);
    if (bytes.next() % 8 == 0) {
      reinterpret_cast<uint8_t*>(memory_.data())[sizeof(S) + bytes.next()] = bytes.next();
    }
  }

 private:
  std::vector<uint64_t> memory_;
};

// Changes one field of a tensor.
void mutate_tensor(DLTensor& tensor, FuzzBytes& bytes);

}  // namespace fovea::test
