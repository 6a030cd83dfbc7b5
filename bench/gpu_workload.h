// SPDX-License-Identifier: Apache-2.0
// A case prepared on a GPU: caches, batch, backend, and the verification of its output.
#pragma once

#include <memory>
#include <string>

#include "bench/gpu_cache.h"
#include "bench/gpu_cases.h"
#include "bench/gpu_ceilings.h"
#include "bench/gpu_output_check.h"
#include "fovea/select_backend.h"
#include "gpu/gpu.h"

namespace fovea::bench {

class GpuWorkload {
 public:
  // Throws Error{unsupported} with the reasons if the backend refuses the case, and
  // Error{out_of_memory} if the caches do not fit.
  GpuWorkload(const GpuCase& config, const BackendWish& wish, MeasureKernels& kernels,
              CacheMemory& memory, Stream stream);
  ~GpuWorkload();

  void plan(Stream stream);
  // Runs one layer of a pass. Turns rotate over sets() caches, queries and outputs.
  void forward(int32_t turn, Stream stream);
  int32_t sets() const;
  const std::string& backend() const;
  double create_seconds() const;  // time for selection, kernels and reserve
  // Runs forward(turn) on an output filled with NaN and verifies it.
  OutputError check(int32_t turn, Stream stream);

 private:
  struct Setup;
  std::unique_ptr<Setup> setup_;
};

}  // namespace fovea::bench
