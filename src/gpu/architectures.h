// SPDX-License-Identifier: Apache-2.0
// Compute capabilities of GPUs, as numbers: 90 is sm_90.
#pragma once

namespace fovea::gpu {

inline constexpr int kAmpere = 80;
inline constexpr int kHopper = 90;

}  // namespace fovea::gpu
