// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_suite.h"

#include <algorithm>

#include "bench/clock.h"
#include "fovea/error.h"
#include "gpu/gpu.h"
#include "kernels/cuda/store.h"

namespace fovea::bench {
namespace {

constexpr size_t kMaxPoolBytes = size_t{40} << 30;

}  // namespace

struct GpuBench::Setup {
  explicit Setup(int device) : start(now()), context(device), context_seconds(now() - start) {
    start = now();
    kernels::cuda::kernel_store();
    pack_seconds = now() - start;
    memory.values = gpu::DeviceBuffer(std::min(kMaxPoolBytes, gpu::free_bytes() / 2));
    // Two f32 scales for each 2 * 64 one-byte values.
    memory.scales = gpu::DeviceBuffer(memory.values.bytes() / 16);
  }
  double start;
  gpu::Context context;
  double context_seconds, pack_seconds = 0;
  gpu::OwnedStream stream;
  CacheMemory memory;
  MeasureKernels kernels{context};
};

GpuBench::GpuBench(int device) : setup_(std::make_unique<Setup>(device)) {}
GpuBench::~GpuBench() = default;

const DeviceInfo& GpuBench::device() const { return setup_->context.info(); }

GpuCeilings GpuBench::ceilings(PowerState state) {
  setup_->memory.dtype = DType::f32;
  return measure_gpu_ceilings(setup_->kernels, setup_->memory.values, state, setup_->stream.get());
}

FirstCall GpuBench::first_call(const GpuCase& config, const BackendWish& wish) {
  const Stream stream = setup_->stream.get();
  FirstCall first{.config = config.name(),
                  .context_seconds = setup_->context_seconds,
                  .pack_seconds = setup_->pack_seconds};
  GpuWorkload workload(config, wish, setup_->kernels, setup_->memory, stream);
  first.create_seconds = workload.create_seconds();
  gpu::synchronize(stream);
  const double start = now();
  workload.plan(stream);
  workload.forward(0, stream);
  gpu::synchronize(stream);
  first.forward_seconds = now() - start;
  return first;
}

GpuResult GpuBench::run(const GpuCase& config, const BackendWish& wish, PowerState state,
                        const GpuCeilings& ceilings) {
  const Stream stream = setup_->stream.get();
  GpuResult result{.config = config, .state = state};
  const double memory = config.bytes() / ceilings.read_bytes;
  const double compute = config.flops() / ceilings.peak(config.fp8_products());
  result.compute_bound = compute > memory;
  result.floor_seconds =
      ceilings.floor_seconds(config.bytes(), config.flops(), config.fp8_products());
  try {
    GpuWorkload workload(config, wish, setup_->kernels, setup_->memory, stream);
    result.backend = workload.backend();
    const GpuWork plan = [&](int32_t, Stream s) { workload.plan(s); };
    const GpuWork forward = [&](int32_t turn, Stream s) { workload.forward(turn, s); };
    workload.plan(stream);
    result.error = workload.check(0, stream);
    if (!result.error.problem.empty()) return result;
    result.forward = time_on_gpu(forward, workload.sets(), state, stream);
    result.ceiling_fraction = std::max(memory, compute) / result.forward.seconds;
    // Verifies the output of the last timed call.
    result.error.problem = workload.check(workload.sets() - 1, stream).problem;
    result.plan_seconds = graph_seconds(plan, stream);
    result.host_plan_seconds = host_seconds(plan, stream);
    if (result.forward.graph) {
      result.eager_seconds = eager_seconds(forward, stream);
      result.host_seconds = host_seconds(forward, stream);
    }
  } catch (const Error& error) {
    result.refused = error.what();
  }
  return result;
}

}  // namespace fovea::bench
