// SPDX-License-Identifier: Apache-2.0
// exp2 and tanh of vectors.
#pragma once

#include <math.h>

#include "kernels/cpu/simd/convert.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.693147180559945309417f;
constexpr float kInfinity = HUGE_VALF;

// Returns 2^x for x <= 0 within 2 ulp: 0 below 2^-126 and for -inf, 1 for 0, NaN for any NaN.
HWY_INLINE F32 exp2_non_positive(F32 x) {
  const F32 smallest = hn::Set(kF32, -126.0f);
#if HWY_TARGET == HWY_AVX3
  const F32 r{_mm512_reduce_ps(x.raw, _MM_FROUND_TO_NEAREST_INT)};
#else
  const hn::Rebind<int32_t, F32Tag> d32;
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits. The 127 is the bias of
  // exponents.
  const F32 magic = hn::Set(kF32, 12582912.0f + 127.0f);
  const F32 shifted = hn::Add(x, magic);
  const F32 r = hn::Sub(x, hn::Sub(shifted, magic));
#endif
  // Minimax on [-1/2, 1/2] with p(0) = 1; relative error 9e-8.
  F32 p = hn::MulAdd(r, hn::Set(kF32, 0.00132647272f), hn::Set(kF32, 0.00967151264f));
  p = hn::MulAdd(p, r, hn::Set(kF32, 0.0555073374f));
  p = hn::MulAdd(p, r, hn::Set(kF32, 0.240222421f));
  p = hn::MulAdd(p, r, hn::Set(kF32, 0.693146978f));
  p = hn::MulAdd(p, r, hn::Set(kF32, 1.0f));
#if HWY_TARGET == HWY_AVX3
  const __mmask16 normal = _mm512_cmp_ps_mask(x.raw, smallest.raw, _CMP_NLT_UQ);  // or NaN
  return F32{_mm512_maskz_scalef_ps(normal, p.raw, hn::Sub(x, r).raw)};
#else
  // For a NaN the power is some number, but p is NaN, and so is the product.
  const F32 power = hn::BitCast(kF32, hn::ShiftLeft<23>(hn::BitCast(d32, shifted)));
  return hn::IfThenZeroElse(hn::Lt(x, smallest), hn::Mul(p, power));
#endif
}

HWY_INLINE float exp2_non_positive(float x) {
  return hn::GetLane(exp2_non_positive(hn::Set(kF32, x)));
}

// Returns tanh(x) within a few ulp: an odd polynomial near 0, a quotient of e^-2|x| elsewhere.
HWY_INLINE F32 tanh_of(F32 x) {
  const F32 a = hn::Abs(x);
  const F32 e = exp2_non_positive(hn::Mul(a, hn::Set(kF32, -2.0f * kLog2E)));
  const F32 one = hn::Set(kF32, 1.0f);
  const F32 quotient = hn::Div(hn::Sub(one, e), hn::Add(one, e));
  const F32 s = hn::Mul(x, x);
  // Minimax of (tanh(x) / x - 1) / x^2 on [0, 0.625^2].
  F32 p = hn::MulAdd(s, hn::Set(kF32, -0.00570498872745f), hn::Set(kF32, 0.0206390887954f));
  p = hn::MulAdd(p, s, hn::Set(kF32, -0.0537397155531f));
  p = hn::MulAdd(p, s, hn::Set(kF32, 0.133314422036f));
  p = hn::MulAdd(p, s, hn::Set(kF32, -0.333332819422f));
  const F32 polynomial = hn::MulAdd(hn::Mul(p, s), a, a);
  return hn::CopySign(hn::IfThenElse(hn::Lt(a, hn::Set(kF32, 0.625f)), polynomial, quotient), x);
}

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
