// SPDX-License-Identifier: Apache-2.0
// The heads of linear layers as both forms of their recurrences read them: token by token, and in
// chunks. For sources in kernels/cpu/simd only.
#pragma once

#include <math.h>

#include "kernels/cpu/simd/convert.h"
#include "kernels/cpu/simd/sums_of_lanes.h"
#include "kernels/linear_attention.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// Rows of a state at a time: enough chains of additions to hide their latency.
constexpr int32_t kGroup = kLanes == 16 ? 8 : 4;

// Calls body(load, store, i) for whole vectors of [0, dim), then for the rest.
template <typename Body>
HWY_INLINE void for_vectors(int32_t dim, const Body& body) {
  int32_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    body([](const auto* from) HWY_ATTR { return load(from); },
         [](F32 value, auto* to) HWY_ATTR { store(value, to); }, i);
  }
  if (i < dim) {
    const int32_t count = dim - i;
    body([count](const auto* from) HWY_ATTR { return load_first(from, count); },
         [count](F32 value, auto* to) HWY_ATTR { store_first(value, to, count); }, i);
  }
}

// Accumulators of a group of rows. Unused ones stay zero.
struct Sums {
  F32 of[kGroup];
};

HWY_INLINE void clear(Sums& sums) {
#pragma GCC unroll 8
  for (int32_t r = 0; r < kGroup; ++r) sums.of[r] = hn::Zero(kF32);
}

HWY_INLINE void store_sums(const Sums& sums, float* to) {
#pragma GCC unroll 2
  for (int32_t r = 0; r < kGroup; r += 4) store_sums_of_lanes(sums.of + r, to + r);
}

// Returns 1 / sqrt(sum of squares + 1e-6).
inline float inverse_norm(const float* x, int32_t dim) {
  Sums sums;
  clear(sums);
  for_vectors(dim, [&](auto load_part, auto, int32_t i) HWY_ATTR {
    const F32 value = load_part(x + i);
    sums.of[0] = hn::MulAdd(value, value, sums.of[0]);
  });
  float total[kGroup];
  store_sums(sums, total);
  return 1.0f / sqrtf(total[0] + 1e-6f);
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Calls body(first element of the pool) with the type of the states.
template <typename Body>
void with_states(void* pool, DType dtype, const Body& body) {
  switch (dtype) {
    case DType::bf16:
      return body(static_cast<Bf16*>(pool));
    case DType::f16:
      return body(static_cast<F16*>(pool));
    default:
      return body(static_cast<float*>(pool));
  }
}

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
