// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_ceilings.h"

#include <algorithm>

#include "bench/gpu_matmul.h"
#include "core/check.h"
#include "kernels/cuda/common/measure_params.h"
#include "kernels/cuda/store.h"

namespace fovea::bench {
namespace {

using namespace kernels::cuda;

constexpr int64_t kMatmulSize = 8192;
constexpr int64_t kMatmulSets = 3;  // 400 MB of bf16 operands each, more than the L2 cache
// A GPU that was busy a second before may not reach its burst clocks.
constexpr int kBurstTries = 4;
constexpr double kMinSeconds = 1e-6;

void measure_memory(MeasureKernels& kernels, const gpu::DeviceBuffer& memory, Stream stream,
                    GpuCeilings& found) {
  const int64_t whole = static_cast<int64_t>(memory.bytes()) / (1 << 20) * (1 << 20);
  const gpu::DeviceBuffer sink(16);
  const ReadParams params{memory.data(), whole, sink.data<uint32_t>()};
  const auto cores = static_cast<uint32_t>(kernels.context().info().cores);
  const Kernel& read = kernels.get("measure/read", {"512", "8", "2"});
  const auto rate = [&](const GpuWork& work) {
    return static_cast<double>(whole) / time_on_gpu(work, 1, PowerState::burst, stream).seconds;
  };
  found.read_bytes = rate([&](int32_t, Stream s) { read.launch({cores * 2, 1}, params, s); });
  if (kernels.context().info().sm == 90) {
    const Kernel& bulk = kernels.get("measure/read_bulk", {"16384", "12"});
    found.bulk_read_bytes = rate([&](int32_t, Stream s) { bulk.launch({cores, 1}, params, s); });
  }
  const auto from = reinterpret_cast<gpu::CUdeviceptr>(memory.data());
  const size_t half = static_cast<size_t>(whole) / 2;
  found.copy_bytes = rate([&](int32_t, Stream s) {
    gpu::check(gpu::driver().copy_on_device(from + half, from, half, s), "cuMemcpyDtoDAsync");
  });
}

double matmul_rate(DType dtype, const gpu::DeviceBuffer& memory, PowerState state, Stream stream) {
  const SquareMatmul matmul(dtype, kMatmulSize);
  const auto in = static_cast<int64_t>(dtype_bytes(dtype)) * kMatmulSize * kMatmulSize;
  const int64_t out = 2 * kMatmulSize * kMatmulSize;
  const int64_t set = 2 * in + out;
  check_argument(static_cast<int64_t>(memory.bytes()) >= kMatmulSets * set,
                 "memory has {} bytes, the matrix products need {}", memory.bytes(),
                 kMatmulSets * set);
  const GpuWork product = [&](int32_t turn, Stream s) {
    char* base = memory.data<char>() + turn % kMatmulSets * set;
    matmul.run(base, base + in, base + 2 * in, s);
  };
  double seconds = time_on_gpu(product, kMatmulSets, state, stream).seconds;
  for (int i = 1; i < kBurstTries && state == PowerState::burst; ++i) {
    seconds = std::min(seconds, time_on_gpu(product, kMatmulSets, state, stream).seconds);
  }
  return matmul.flops() / seconds;
}

}  // namespace

const Kernel& MeasureKernels::get(const std::string& folder, const VariantValues& values) {
  const gpu::KernelVariant variant = make_variant(family(folder), values, context_.info().sm);
  auto found = loaded_.find(variant.name);
  if (found == loaded_.end()) {
    found = loaded_.emplace(variant.name, Kernel(variant, kernel_store())).first;
  }
  return found->second;
}

std::string variant_value(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
    case DType::f8e4m3:
      return "f8e4m3";
    default:
      fail(ErrorCode::unsupported, "{} has no kernels to measure with", dtype_name(dtype));
  }
}

void MeasureKernels::fill_noise(void* data, DType dtype, int64_t count, uint32_t seed, float factor,
                                float offset, Stream stream, int64_t row, int64_t row_stride) {
  get("measure/noise", {variant_value(dtype)})
      .launch(grid(),
              NoiseParams{data, count, row ? row : count, row ? row_stride : count, seed, offset,
                          factor},
              stream);
}

double GpuCeilings::floor_seconds(double bytes, double flops, bool fp8) const {
  return kMinSeconds + std::max(bytes / read_bytes, flops / peak(fp8));
}

GpuCeilings measure_gpu_ceilings(MeasureKernels& kernels, const gpu::DeviceBuffer& memory,
                                 PowerState state, Stream stream) {
  GpuCeilings found;
  const auto elements = static_cast<int64_t>(memory.bytes()) / 2;
  kernels.fill_noise(memory.data(), DType::bf16, elements, 1, 1, 0, stream);
  measure_memory(kernels, memory, stream, found);
  const Kernel& empty = kernels.get("measure/empty", {"32"});
  const GpuWork nothing = [&](int32_t, Stream s) { empty.launch({}, EmptyParams{}, s); };
  found.empty_seconds = graph_seconds(nothing, stream);
  found.launch_seconds = host_seconds(nothing, stream);
  kernels.fill_noise(memory.data(), DType::bf16, elements, 1, 1, 0, stream);
  found.matmul_flops = matmul_rate(DType::bf16, memory, state, stream);
  if (kernels.context().info().sm >= 89) {
    kernels.fill_noise(memory.data(), DType::f8e4m3, elements, 1, 1, 0, stream);
    found.fp8_matmul_flops = matmul_rate(DType::f8e4m3, memory, state, stream);
  }
  return found;
}

}  // namespace fovea::bench
