// SPDX-License-Identifier: Apache-2.0
// Offsets in a row of KvLayout::mla_fp8_rows: e4m3 latent, its f32 scales, the bf16 rotary key.
#pragma once

namespace fovea::kernels {

inline constexpr int kMlaRowLatent = 512;
inline constexpr int kMlaRowScaleGroup = 128;
inline constexpr int kMlaRowScaleOffset = 512;
inline constexpr int kMlaRowRopeOffset = 528;
inline constexpr int kMlaRowRope = 64;
inline constexpr int kMlaRowBytes = kMlaRowRopeOffset + 2 * kMlaRowRope;

}  // namespace fovea::kernels
