// SPDX-License-Identifier: Apache-2.0
// What the GPU can do at most, measured here and now, and the kernels it is measured with.
#pragma once

#include <map>
#include <string>

#include "bench/gpu_timing.h"
#include "fovea/dtype.h"
#include "gpu/gpu.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/kernel.h"

namespace fovea::bench {

// Kernels of kernels/cuda/measure by name, loaded from the process's store when first asked for.
class MeasureKernels {
 public:
  explicit MeasureKernels(const gpu::Context& context) : context_(context) {}

  // values as in the folder's variants.txt.
  const kernels::cuda::Kernel& get(const std::string& folder,
                                   const kernels::cuda::VariantValues& values);
  // Enough blocks of any of them to fill the device.
  kernels::cuda::GridSize grid() const {
    return {static_cast<uint32_t>(context_.info().cores) * 4, 1};
  }
  const gpu::Context& context() const { return context_; }

  // Element i = offset + factor * normal; floating dtypes but f8e5m2. Rows of `row` elements stand
  // row_stride elements apart; 0: dense.
  void fill_noise(void* data, DType dtype, int64_t count, uint32_t seed, float factor, float offset,
                  Stream stream, int64_t row = 0, int64_t row_stride = 0);

 private:
  const gpu::Context& context_;
  std::map<std::string, kernels::cuda::Kernel> loaded_;
};

// Name of a dtype as a value of a variant.
std::string variant_value(DType dtype);

struct GpuCeilings {
  double read_bytes = 0;        // bytes/s by plain loads
  double bulk_read_bytes = 0;   // by bulk copies; 0: this GPU has none
  double copy_bytes = 0;        // read plus written, device to device
  double matmul_flops = 0;      // bf16, dense, 8192^3
  double fp8_matmul_flops = 0;  // e4m3
  double empty_seconds = 0;     // a launch of nothing inside a graph
  double launch_seconds = 0;    // the same, host time of an eager launch

  double peak(bool fp8) const { return fp8 ? fp8_matmul_flops : matmul_flops; }
  // No attention call runs faster: a microsecond, then what binds.
  double floor_seconds(double bytes, double flops, bool fp8) const;
};

// About two seconds; four when sustained. `memory`: device memory to read, 2 GB or more, its
// content is overwritten with noise.
GpuCeilings measure_gpu_ceilings(MeasureKernels& kernels, const gpu::DeviceBuffer& memory,
                                 PowerState state, Stream stream);

}  // namespace fovea::bench
