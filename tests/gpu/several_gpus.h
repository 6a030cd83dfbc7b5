// SPDX-License-Identifier: Apache-2.0
// Tests of several GPUs are skipped where there are fewer.
#pragma once

#include <gtest/gtest.h>

#include "fovea/gpu.h"

namespace fovea {

inline int gpus() { return static_cast<int>(gpu_devices().size()); }

#define FOVEA_NEEDS_GPUS(count) \
  if (gpus() < (count)) GTEST_SKIP() << "there are " << gpus() << " GPUs, this needs " << (count)

}  // namespace fovea
