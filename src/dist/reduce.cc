// SPDX-License-Identifier: Apache-2.0
#include "dist/reduce.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "core/float_types.h"

namespace fovea {
namespace {

// Elements that are reduced before any of them is written, because `out` may be one of `in`.
constexpr int64_t kBlock = 512;

template <typename T>
T combine(T a, T b, ReduceOp op) {
  if (op == ReduceOp::sum) {
    if constexpr (std::is_integral_v<T>) {
      using Unsigned = std::make_unsigned_t<T>;  // wraps around without undefined behaviour
      return static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
    } else {
      return a + b;
    }
  }
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a) || std::isnan(b)) return a + b;
  }
  return std::max(a, b);
}

// T is the type of the sum.
template <typename T, typename Load, typename Store>
void reduce(const RankArrays& arrays, int64_t begin, int64_t end, Load load, Store store) {
  T block[kBlock];
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t count = std::min(kBlock, end - first);
    for (int64_t i = 0; i < count; ++i) block[i] = load(arrays.in[0], first + i);
    for (const void* const other : arrays.in.subspan(1)) {
      for (int64_t i = 0; i < count; ++i) {
        block[i] = combine(block[i], load(other, first + i), arrays.op);
      }
    }
    for (void* const target : arrays.out) {
      for (int64_t i = 0; i < count; ++i) store(target, first + i, block[i]);
    }
  }
}

template <typename T>
void reduce_plain(const RankArrays& arrays, int64_t begin, int64_t end) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(T));
  const auto load = [](const void* data, int64_t i) {
    T value;  // arrays may have any alignment
    std::memcpy(&value, static_cast<const char*>(data) + i * kBytes, sizeof(T));
    return value;
  };
  const auto store = [](void* data, int64_t i, T value) {
    std::memcpy(static_cast<char*>(data) + i * kBytes, &value, sizeof(T));
  };
  reduce<T>(arrays, begin, end, load, store);
}

}  // namespace

void reduce_ranks(const RankArrays& arrays, int64_t begin, int64_t end) {
  const DType dtype = arrays.dtype;
  switch (dtype) {
    case DType::f32:
      return reduce_plain<float>(arrays, begin, end);
    case DType::i32:
      return reduce_plain<int32_t>(arrays, begin, end);
    case DType::i64:
      return reduce_plain<int64_t>(arrays, begin, end);
    default:
      return reduce<float>(
          arrays, begin, end,
          [dtype](const void* data, int64_t i) { return load_float(data, dtype, i); },
          [dtype](void* data, int64_t i, float value) { store_float(data, dtype, i, value); });
  }
}

}  // namespace fovea
