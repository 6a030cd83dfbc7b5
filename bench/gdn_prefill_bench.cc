// SPDX-License-Identifier: Apache-2.0
// Times the prefill of gated delta net on Hopper, plan included, over inputs that no cache holds.
// The floor is the larger of the bytes of q, k, v and outputs at the measured bandwidth of copies,
// and the products of all chunks at the measured rate. Argument: a part of the names of cases.
#include <fmt/core.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "bench/gpu_ceilings.h"
#include "bench/gpu_timing.h"
#include "fovea/error.h"
#include "fovea/gpu.h"
#include "kernels/cuda/gdn_prefill.h"
#include "kernels/cuda/store.h"

namespace fovea::bench {
namespace {

namespace cuda = kernels::cuda;

struct Shape {
  const char* name;
  int32_t requests, tokens;  // tokens of each request
  int32_t key_heads, value_heads;
};

constexpr Shape kShapes[] = {
    {"16/32 1x1k", 1, 1024, 16, 32},   {"16/32 1x4k", 1, 4096, 16, 32},
    {"16/32 1x16k", 1, 16384, 16, 32}, {"16/32 8x2k", 8, 2048, 16, 32},
    {"16/32 4x8k", 4, 8192, 16, 32},   {"4/8 1x1k", 1, 1024, 4, 8},
    {"4/8 1x16k", 1, 16384, 4, 8},     {"16/64 1x8k", 1, 8192, 16, 64},
};

constexpr int64_t kCacheBytes = int64_t{256} << 20;  // more than any cache holds
// Products of a chunk and a value head in units of 64 x 64 x 128: two with the state and its
// update, two units each, and two over tokens. Value heads share two units, of keys and of queries.
constexpr double kOwnUnits = 3 * 2 + 2, kSharedUnits = 2;

// One set of inputs and outputs.
struct Layer {
  gpu::DeviceBuffer q, k, v, log_decay, beta, state, out;

  Layer(const Shape& shape, MeasureKernels& kernels, uint32_t seed, Stream stream) {
    constexpr int64_t kDim = cuda::kGdnDim;
    const int64_t tokens = int64_t{shape.requests} * shape.tokens;
    const auto fill = [&](gpu::DeviceBuffer& buffer, DType dtype, int64_t count, float factor,
                          float offset) {
      buffer = gpu::DeviceBuffer(static_cast<size_t>(count) * (dtype == DType::f32 ? 4 : 2));
      kernels.fill_noise(buffer.data(), dtype, count, ++seed, factor, offset, stream);
    };
    fill(q, DType::bf16, tokens * shape.key_heads * kDim, 1, 0);
    fill(k, DType::bf16, tokens * shape.key_heads * kDim, 1, 0);
    fill(v, DType::bf16, tokens * shape.value_heads * kDim, 1, 0);
    fill(log_decay, DType::f32, tokens * shape.value_heads, 0.01f, -0.1f);
    fill(beta, DType::f32, tokens * shape.value_heads, 0.05f, 0.5f);
    fill(state, DType::f32, int64_t{shape.requests} * shape.value_heads * kDim * kDim, 1, 0);
    fill(out, DType::bf16, tokens * shape.value_heads * kDim, 0, 0);
  }
};

// Returns bytes of inputs and outputs, each moved once.
double bytes_of(const Shape& shape) {
  return 2.0 * shape.requests * shape.tokens * cuda::kGdnDim *
         (2 * shape.key_heads + 2 * shape.value_heads);
}

double floor_seconds(const Shape& shape, const GpuCeilings& ceilings) {
  constexpr double kUnitFlops = 2.0 * cuda::kGdnChunk * cuda::kGdnChunk * cuda::kGdnDim;
  const int32_t chunks = shape.requests * shape.tokens / cuda::kGdnChunk;
  const double units = shape.value_heads * kOwnUnits + shape.key_heads * kSharedUnits;
  return std::max(bytes_of(shape) / ceilings.copy_bytes,
                  chunks * units * kUnitFlops / ceilings.matmul_flops);
}

double seconds_of(const Shape& shape, MeasureKernels& kernels, Stream stream) {
  const int32_t tokens = shape.requests * shape.tokens;
  const cuda::GdnPrefillSetup setup = {.key_heads = shape.key_heads,
                                       .value_heads = shape.value_heads,
                                       .key_dim = cuda::kGdnDim,
                                       .value_dim = cuda::kGdnDim,
                                       .max_tokens = tokens,
                                       .max_requests = shape.requests,
                                       .sm = kernels.context().info().sm,
                                       .multiprocessors = kernels.context().info().cores};
  const cuda::GdnPrefill prefill(setup, cuda::kernel_store());
  const gpu::DeviceBuffer workspace(cuda::GdnPrefill::workspace_bytes(setup));
  std::vector<int32_t> indices;  // q_indptr, then kv_lens, then state_slots
  for (int32_t i = 0; i <= shape.requests; ++i) indices.push_back(i * shape.tokens);
  for (int32_t i = 0; i < shape.requests; ++i) indices.push_back(2 * shape.tokens);
  for (int32_t i = 0; i < shape.requests; ++i) indices.push_back(i);
  const gpu::DeviceBuffer lists(indices.size() * sizeof(int32_t));
  gpu::copy_to_device(lists.data(), indices.data(), indices.size() * sizeof(int32_t), stream);
  const auto* const q_indptr = lists.data<int32_t>();
  const cuda::GdnPrefillBatch batch = {.q_indptr = q_indptr,
                                       .kv_lens = q_indptr + shape.requests + 1,
                                       .state_slots = q_indptr + 2 * shape.requests + 1,
                                       .requests = shape.requests,
                                       .tokens = tokens};
  std::vector<Layer> layers;
  const auto sets = static_cast<int32_t>(kCacheBytes / static_cast<int64_t>(bytes_of(shape))) + 1;
  for (int32_t i = 0; i < sets; ++i) {
    layers.emplace_back(shape, kernels, static_cast<uint32_t>(100 * i), stream);
  }
  const auto run = [&](int32_t turn, Stream to) {
    const Layer& layer = layers[static_cast<size_t>(turn % sets)];
    cuda::GdnPrefillTensors tensors;
    tensors.q = layer.q.data();
    tensors.k = layer.k.data();
    tensors.v = layer.v.data();
    tensors.q_token_stride = tensors.k_token_stride = int64_t{shape.key_heads} * cuda::kGdnDim;
    tensors.v_token_stride = tensors.out_token_stride = int64_t{shape.value_heads} * cuda::kGdnDim;
    tensors.log_decay = layer.log_decay.data<float>();
    tensors.beta = layer.beta.data<float>();
    tensors.state = layer.state.data<float>();
    tensors.state_slot_stride = int64_t{shape.value_heads} * cuda::kGdnDim * cuda::kGdnDim;
    tensors.out = layer.out.data();
    tensors.scale = 0.088388348f;
    tensors.l2_normalise_qk = true;
    prefill.plan(batch, workspace.data(), to);
    prefill.run(batch, tensors, workspace.data(), to);
  };
  return time_on_gpu(run, sets, PowerState::burst, stream).seconds;
}

void run_all(std::string_view filter) {
  const gpu::Context context(0);
  MeasureKernels kernels(context);
  const gpu::OwnedStream stream;
  const gpu::DeviceBuffer memory(size_t{4} << 30);
  const GpuCeilings ceilings =
      measure_gpu_ceilings(kernels, memory, PowerState::burst, stream.get());
  fmt::print("| case | us | floor | of floor |\n| --- | ---: | ---: | ---: |\n");
  for (const Shape& shape : kShapes) {
    if (std::string_view(shape.name).find(filter) == std::string_view::npos) continue;
    const double seconds = seconds_of(shape, kernels, stream.get());
    const double floor = floor_seconds(shape, ceilings);
    fmt::print("| {} | {:.1f} | {:.1f} | {:.2f} |\n", shape.name, seconds * 1e6, floor * 1e6,
               floor / seconds);
  }
}

}  // namespace
}  // namespace fovea::bench

int main(int count, char** arguments) {
  try {
    fovea::bench::run_all(count > 1 ? arguments[1] : "");
  } catch (const fovea::Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
