// SPDX-License-Identifier: Apache-2.0
// Times attention backends on a GPU: cold caches, verified output, fractions of the GPU's ceilings.
#pragma once

#include <memory>

#include "bench/gpu_ceilings.h"
#include "fovea/device.h"

namespace fovea::bench {

// One GPU set up to be measured: half of its free memory, at most 40 GB, is filled with noise and
// lent to the cases as caches.
class GpuBench {
 public:
  // Error{unsupported} without a GPU, Error{invalid_argument} when there is no such device.
  explicit GpuBench(int device);
  ~GpuBench();

  const DeviceInfo& device() const;
  GpuCeilings ceilings(PowerState state);

 private:
  struct Setup;
  std::unique_ptr<Setup> setup_;
};

}  // namespace fovea::bench
