// SPDX-License-Identifier: Apache-2.0
// Measures the limits of the GPU at the time of the benchmark, with its own kernels.
#pragma once

#include <map>
#include <string>

#include "bench/gpu_timing.h"
#include "fovea/dtype.h"
#include "gpu/gpu.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/kernel.h"

namespace fovea::bench {

// Kernels of kernels/cuda/measure by name, loaded from the process's store on first use.
class MeasureKernels {
 public:
  explicit MeasureKernels(const gpu::Context& context) : context_(context) {}

  // `values` as in the folder's variants.txt.
  const kernels::cuda::Kernel& get(const std::string& folder,
                                   const kernels::cuda::VariantValues& values);
  // Returns enough blocks of any of these kernels to fill the device.
  kernels::cuda::GridSize grid() const {
    return {static_cast<uint32_t>(context_.info().cores) * 4, 1};
  }
  const gpu::Context& context() const { return context_; }

  // Sets element i to offset + factor * normal, for all floating dtypes except f8e5m2. Rows of
  // `row` elements begin at intervals of row_stride elements; 0 means dense.
  void fill_noise(void* data, DType dtype, int64_t count, uint32_t seed, float factor, float offset,
                  Stream stream, int64_t row = 0, int64_t row_stride = 0);

 private:
  const gpu::Context& context_;
  std::map<std::string, kernels::cuda::Kernel> loaded_;
};

// Returns the name of a dtype in variants.
std::string variant_value(DType dtype);

struct GpuCeilings {
  double read_bytes = 0;        // bytes per second by plain loads
  double bulk_read_bytes = 0;   // by bulk copies; 0 if the GPU has none
  double copy_bytes = 0;        // read plus written, device to device
  double matmul_flops = 0;      // bf16, dense, 8192^3
  double fp8_matmul_flops = 0;  // e4m3
  double empty_seconds = 0;     // an empty kernel inside a graph
  double launch_seconds = 0;    // host time of an eager launch of an empty kernel

  double peak(bool fp8) const { return fp8 ? fp8_matmul_flops : matmul_flops; }
  // Returns a lower bound for any attention call: one microsecond plus the binding ceiling.
  double floor_seconds(double bytes, double flops, bool fp8) const;
};

// Takes about two seconds, or four for the sustained state. `memory` is device memory of at least 2
// GB, which is overwritten with noise and read.
GpuCeilings measure_gpu_ceilings(MeasureKernels& kernels, const gpu::DeviceBuffer& memory,
                                 PowerState state, Stream stream);

}  // namespace fovea::bench
