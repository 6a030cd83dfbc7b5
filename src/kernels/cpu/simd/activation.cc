// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/simd/activation.h"

#include "kernels/cpu/simd/exponentials.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// Returns e^x for x <= 0. The product with log2(e) has the bits of two floats, so that the relative
// error does not grow with x.
HWY_INLINE F32 exp_non_positive(F32 x) {
  constexpr float kLog2ERest = 1.92596299e-8f;  // log2(e) - kLog2E
  const F32 product = hn::Mul(x, hn::Set(kF32, kLog2E));
  const F32 rest =
      hn::MulAdd(x, hn::Set(kF32, kLog2ERest), hn::MulSub(x, hn::Set(kF32, kLog2E), product));
  const F32 power = exp2_non_positive(product);
  return hn::MulAdd(hn::Mul(power, rest), hn::Set(kF32, kLn2), power);
}

// Returns 1 / (1 + e^-x).
HWY_INLINE F32 sigmoid(F32 x) {
  const F32 e = exp_non_positive(hn::Neg(hn::Abs(x)));
  const F32 one = hn::Set(kF32, 1.0f);
  const F32 numerator = hn::IfNegativeThenElse(x, e, one);
  return hn::Div(numerator, hn::Add(one, e));
}

// Returns the smaller of both; x if it is NaN.
HWY_INLINE F32 smaller(F32 x, F32 limit) { return hn::IfThenElse(hn::Gt(x, limit), limit, x); }

// Loads up to kLanes values `step` elements apart; others are 0.
HWY_INLINE F32 load_some(const float* from, int32_t step, int32_t count) {
  HWY_ALIGN float values[kLanes] = {};
  for (int32_t i = 0; i < count && i < kLanes; ++i) values[i] = from[i * step];
  return hn::Load(kF32, values);
}

template <typename Activate>
HWY_INLINE void activate_row(const ActivatedRow& row, const Activate& activate) {
  int32_t i = 0;
  if (row.step == 1) {
    for (; i + kLanes <= row.dim; i += kLanes) {
      hn::StoreU(activate(load(row.gate + i), load(row.up + i)), kF32, row.out + i);
    }
  }
  for (; i < row.dim; i += kLanes) {
    const F32 gate = load_some(row.gate + i * row.step, row.step, row.dim - i);
    const F32 up = load_some(row.up + i * row.step, row.step, row.dim - i);
    HWY_ALIGN float results[kLanes];
    hn::Store(activate(gate, up), kF32, results);
    for (int32_t j = 0; j < kLanes && i + j < row.dim; ++j) row.out[i + j] = results[j];
  }
}

}  // namespace

void activate_silu(const ActivatedRow& row) {
  activate_row(row, [](F32 gate, F32 up) { return hn::Mul(hn::Mul(gate, sigmoid(gate)), up); });
}

void activate_gelu(const ActivatedRow& row) {
  const F32 half = hn::Set(kF32, 0.5f), cubic = hn::Set(kF32, 0.044715f);
  const F32 scale = hn::Set(kF32, 0.79788456f);  // sqrt(2 / pi)
  activate_row(row, [&](F32 gate, F32 up) {
    const F32 cube = hn::Mul(hn::Mul(gate, gate), gate);
    const F32 inner = tanh_of(hn::Mul(scale, hn::MulAdd(cubic, cube, gate)));
    return hn::Mul(hn::MulAdd(hn::Mul(half, gate), inner, hn::Mul(half, gate)), up);
  });
}

void activate_swiglu(const ActivatedRow& row) {
  const F32 limit = hn::Set(kF32, row.limit), alpha = hn::Set(kF32, row.alpha);
  const F32 one = hn::Set(kF32, 1.0f);
  activate_row(row, [&](F32 gate, F32 up) {
    const F32 g = smaller(gate, limit);
    const F32 u = hn::Neg(smaller(hn::Neg(smaller(up, limit)), limit));
    return hn::Mul(hn::Add(u, one), hn::Mul(g, sigmoid(hn::Mul(alpha, g))));
  });
}

}  // namespace fovea::kernels::cpu::FOVEA_ISA
