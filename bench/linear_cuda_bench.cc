// SPDX-License-Identifier: Apache-2.0
// Times linear layers on a GPU, over inputs and states that no cache holds. Arguments: parts of the
// names of cases; cases with any of them run.
//
// `delta`, `mamba2`, `kda`, `lightning` and `mamba1` are layers of `linear_cuda` with their
// convolution, or `alone` without it: decode, verification of four drafts, and prompts. Their floor
// is the bytes of all states, read and written at the measured rate of copies; that of `conv`, a
// convolution alone, those of windows, inputs and outputs. Verification with a
// snapshot after each draft writes five states for each read one; with `kept` drafts, one, which
// takes in accepted drafts of the pass before. An engine's `step` has a token and four drafts.
//
// `chunks` and `kda chunks` are the prefill of gated delta net and of KDA on Hopper by themselves,
// plan included. Their floor is the larger of the bytes of q, k, v, decays of columns and outputs
// at the rate of copies, and the products of all chunks at the measured rate.
#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bench/gpu_ceilings.h"
#include "bench/gpu_timing.h"
#include "bench/linear_cuda_cases.h"
#include "fovea/error.h"
#include "fovea/gpu.h"
#include "fovea/select_backend.h"
#include "kernels/cuda/sm90/chunk_common/launch.h"
#include "kernels/cuda/store.h"

namespace fovea::bench {
namespace {

namespace cuda = kernels::cuda;

constexpr int64_t kCacheBytes = int64_t{256} << 20;  // more than any cache holds

bool is_convolution(const Shape& shape) { return shape.kind == AttentionKind::short_conv; }

int64_t state_bytes(const Shape& shape) {
  const LinearSpec& linear = shape.linear;
  return int64_t{linear.value_heads} * linear.value_dim * linear.key_dim *
         static_cast<int64_t>(dtype_bytes(shape.states));
}

// Returns the bytes of a layer that a pass reads or writes once: windows and rows of a convolution,
// or else states.
int64_t held_bytes(const Shape& shape, const Load& load) {
  if (!is_convolution(shape)) return load.requests * state_bytes(shape);
  const int64_t values = load.requests * (shape.linear.conv_width - 1 + load.tokens);
  return values * shape.linear.conv_dim() * static_cast<int64_t>(sizeof(float));
}

double floor_seconds(const Shape& shape, const Load& load, const GpuCeilings& ceilings) {
  const int32_t copies = 2 + (load.snapshots ? load.tokens : 0);
  return static_cast<double>(copies * held_bytes(shape, load)) / ceilings.copy_bytes;
}

class Layers {
 public:
  Layers(const Shape& shape, const Load& load, MeasureKernels& kernels, Stream stream)
      : shape_(shape), load_(load), tokens_(load.requests * load.tokens) {
    const LinearSpec& linear = shape.linear;
    StateCacheSpec states{.layers = static_cast<int32_t>(kCacheBytes / held_bytes(shape, load)) + 2,
                          .conv_dim = conv_dim_of(spec()),
                          .conv_width = std::max(1, linear.conv_width),
                          .heads = linear.value_heads,
                          .rows = linear.value_dim,
                          .columns = linear.key_dim,
                          .dtype = shape.states,
                          .max_drafts = load.max_drafts,
                          .draft_inputs = load.max_drafts > 0 ? draft_row(spec()).size : 0};
    if (is_convolution(shape)) states.heads = states.rows = states.columns = 0;
    rows_ = is_convolution(shape) ? states.layers : 1;
    const int32_t slots = 1 + load.requests + (load.snapshots ? tokens_ : 0);
    const Device device = kernels.context().info().device();
    pool_ = make_state_pool(states, slots, device);
    for (int32_t i = 0; i < states.layers; ++i) {
      const StateLayerView view = pool_->layer(i);
      const auto seed = static_cast<uint32_t>(i + 1);
      kernels.fill_noise(view.state, shape.states, view.state_slot_stride * slots, seed, 1, 0,
                         stream);
      if (view.drafts != nullptr) {
        const int64_t values = int64_t{2} * load.max_drafts * states.draft_inputs * slots;
        kernels.fill_noise(view.drafts, DType::f32, values, seed, 0.1f, -0.2f, stream);
      }
      if (view.conv_slot_stride > 0) {
        kernels.fill_noise(view.conv, DType::f32, view.conv_slot_stride * slots, seed, 1, 0,
                           stream);
      }
    }
    const auto fill = [&](gpu::DeviceBuffer& buffer, int64_t count, float factor, float offset) {
      buffer = gpu::DeviceBuffer(static_cast<size_t>(count) * sizeof(float));
      kernels.fill_noise(buffer.data(), DType::f32, count, 7, factor, offset, stream);
    };
    fill(mixed_, int64_t{rows_} * tokens_ * linear.conv_dim(), 1, 0);
    if (linear.conv_width > 0) {
      fill(weight_, int64_t{linear.conv_dim()} * linear.conv_width, 0.5f, 0);
    }
    const bool is_mamba1 = shape.kind == AttentionKind::mamba1;
    const int64_t gates = is_mamba1 || shape.kind == AttentionKind::lightning ? 1 : tokens_;
    const int64_t columns = is_mamba1 || shape.kind == AttentionKind::kda ? linear.key_dim : 1;
    fill(log_decay_, gates * linear.value_heads * columns, 0.01f, -0.1f);
    fill(beta_, int64_t{tokens_} * linear.value_heads, 0.05f, 0.5f);
    fill(out_, rows_ * out_values(), 1, 0);
    make_batch(stream);
    if (load.max_drafts > 0) set_marks(stream);
    make_backend(device, stream);
  }

  double seconds(Stream stream) const {
    const int32_t layers = pool_->spec().layers;
    const auto run = [&](int32_t turn, Stream to) {
      LayerTensors layer;
      layer.layer = turn % layers;
      const int32_t rows = turn % rows_;
      layer.out = dense_rows(out_.data<float>() + rows * out_values(), DType::f32,
                             shape_.linear.value_heads, shape_.linear.value_dim);
      layer.linear.mixed =
          mixed_.data<float>() + int64_t{rows} * tokens_ * shape_.linear.conv_dim();
      layer.linear.conv_weight = weight_.data<float>();
      if (convolves_alone(shape_.kind) && shape_.linear.conv_width > 0) {  // two calls
        backend_->forward(layer, to);
        layer.linear.conv_weight = nullptr;
        if (is_convolution(shape_)) return;
      }
      layer.linear.log_decay = log_decay_.data<float>();
      if (shape_.kind != AttentionKind::lightning) layer.linear.beta = beta_.data<float>();
      layer.linear.l2_normalise_qk = has_delta_rule(shape_.kind);
      backend_->forward(layer, to);
    };
    return time_on_gpu(run, layers, PowerState::burst, stream).seconds;
  }

 private:
  AttentionSpec spec() const {
    return {.kind = shape_.kind, .q_dtype = DType::bf16, .linear = shape_.linear};
  }

  int64_t out_values() const {
    return int64_t{tokens_} * shape_.linear.value_heads * shape_.linear.value_dim;
  }

  // Slots hold max_drafts drafts, of which the batch's lengths count `accepted`.
  void set_marks(Stream stream) {
    const StateMark mark = {.tokens = load_.tokens - load_.accepted, .drafts = load_.max_drafts};
    const std::vector<StateMark> marks(static_cast<size_t>(pool_->slots()), mark);
    gpu::copy_to_device(pool_->marks(), marks.data(), marks.size() * sizeof(StateMark), stream);
    gpu::synchronize(stream);
  }

  // Every request has context, so states are read.
  void make_batch(Stream stream) {
    std::vector<int32_t> indices;  // q_indptr, kv_lens, state_slots, draft_counts, snapshot_slots
    for (int32_t i = 0; i <= load_.requests; ++i) indices.push_back(i * load_.tokens);
    for (int32_t i = 0; i < load_.requests; ++i) indices.push_back(2 * load_.tokens);
    for (int32_t i = 0; i < load_.requests; ++i) indices.push_back(1 + i);
    for (int32_t i = 0; i < load_.requests; ++i) indices.push_back(load_.drafts);
    for (int32_t i = 0; i < tokens_; ++i) indices.push_back(1 + load_.requests + i);
    lists_ = gpu::to_device(indices, stream);
    const auto requests = static_cast<size_t>(load_.requests);
    const std::span<const int32_t> all = lists_.span<int32_t>();
    batch_.mode = load_.tokens == 1 ? ForwardMode::decode : ForwardMode::extend;
    batch_.requests = load_.requests;
    batch_.tokens = tokens_;
    batch_.hints.max_q_len = load_.tokens;
    batch_.q_indptr = all.first(requests + 1);
    batch_.kv_lens = all.subspan(requests + 1, requests);
    batch_.linear.state_slots = all.subspan(2 * requests + 1, requests);
    if (load_.max_drafts > 0) batch_.linear.draft_counts = all.subspan(3 * requests + 1, requests);
    if (load_.snapshots) batch_.linear.snapshot_slots = all.subspan(4 * requests + 1);
  }

  void make_backend(Device device, Stream stream) {
    const BackendRegistry registry = BackendRegistry::builtin();
    backend_ = registry.find("linear_cuda")
                   ->create({.spec = spec(), .state = pool_.get(), .device = device});
    backend_->reserve({.max_requests = load_.requests,
                       .max_tokens = tokens_,
                       .max_q_len = load_.tokens,
                       .max_kv_len = 2 * load_.tokens});
    backend_->plan(batch_, stream);
  }

  Shape shape_;
  Load load_;
  int32_t tokens_;
  int32_t rows_;  // sets of inputs and outputs; one if states exceed the caches
  std::unique_ptr<StatePool> pool_;
  gpu::DeviceBuffer mixed_, weight_, log_decay_, beta_, out_, lists_;
  BatchView batch_;
  std::unique_ptr<AttentionBackend> backend_;
};

struct ChunkShape {
  const char* name;
  int32_t requests, tokens;  // tokens of each request
  int32_t key_heads, value_heads;
  bool is_kda = false;

  // Log decays of a token.
  int64_t decays() const { return int64_t{value_heads} * (is_kda ? cuda::kKeyDim : 1); }
};

constexpr ChunkShape kChunkShapes[] = {
    {"chunks 16/32 1x1k", 1, 1024, 16, 32},
    {"chunks 16/32 1x4k", 1, 4096, 16, 32},
    {"chunks 16/32 1x16k", 1, 16384, 16, 32},
    {"chunks 16/32 8x2k", 8, 2048, 16, 32},
    {"chunks 16/32 4x8k", 4, 8192, 16, 32},
    {"chunks 4/8 1x1k", 1, 1024, 4, 8},
    {"chunks 4/8 1x2k", 1, 2048, 4, 8},
    {"chunks 4/8 1x4k", 1, 4096, 4, 8},
    {"chunks 4/8 1x16k", 1, 16384, 4, 8},
    {"chunks 4/8 2x8k", 2, 8192, 4, 8},
    {"chunks 4/8 8x2k", 8, 2048, 4, 8},
    {"chunks 8/16 1x4k", 1, 4096, 8, 16},
    {"chunks 8/16 1x16k", 1, 16384, 8, 16},
    {"chunks 16/64 1x8k", 1, 8192, 16, 64},
    {"kda chunks 32 1x1k", 1, 1024, 32, 32, true},
    {"kda chunks 32 1x4k", 1, 4096, 32, 32, true},
    {"kda chunks 32 1x16k", 1, 16384, 32, 32, true},
    {"kda chunks 32 8x2k", 8, 2048, 32, 32, true},
    {"kda chunks 32 4x8k", 4, 8192, 32, 32, true},
    {"kda chunks 16 1x8k", 1, 8192, 16, 16, true},
    {"kda chunks 8 1x2k", 1, 2048, 8, 8, true},
    {"kda chunks 8 1x4k", 1, 4096, 8, 8, true},
    {"kda chunks 8 1x16k", 1, 16384, 8, 8, true},
};

// Products of a chunk and a value head in units of 64 x 64 x 128: two with the state and its
// update, two units each, and two over tokens. Value heads share two units, of keys and of queries.
constexpr double kOwnUnits = 3 * 2 + 2, kSharedUnits = 2;

// One layer's inputs and outputs.
struct ChunkInputs {
  gpu::DeviceBuffer q, k, v, log_decay, beta, state, out;

  ChunkInputs(const ChunkShape& shape, MeasureKernels& kernels, uint32_t seed, Stream stream) {
    constexpr int64_t kDim = cuda::kKeyDim;
    const int64_t tokens = int64_t{shape.requests} * shape.tokens;
    const auto fill = [&](gpu::DeviceBuffer& buffer, DType dtype, int64_t count, float factor,
                          float offset) {
      buffer = gpu::DeviceBuffer(static_cast<size_t>(count) * (dtype == DType::f32 ? 4 : 2));
      kernels.fill_noise(buffer.data(), dtype, count, ++seed, factor, offset, stream);
    };
    fill(q, DType::bf16, tokens * shape.key_heads * kDim, 1, 0);
    fill(k, DType::bf16, tokens * shape.key_heads * kDim, 1, 0);
    fill(v, DType::bf16, tokens * shape.value_heads * kDim, 1, 0);
    fill(log_decay, DType::f32, tokens * shape.decays(), 0.01f, -0.1f);
    fill(beta, DType::f32, tokens * shape.value_heads, 0.05f, 0.5f);
    fill(state, DType::f32, int64_t{shape.requests} * shape.value_heads * kDim * kDim, 1, 0);
    fill(out, DType::f32, tokens * shape.value_heads * kDim, 0, 0);
  }
};

// Returns the bytes of inputs in bf16, and of outputs and KDA's decays in f32, each moved once.
double bytes_of(const ChunkShape& shape) {
  const int32_t per_value = 2 + 4 + (shape.is_kda ? 4 : 0);
  return 1.0 * shape.requests * shape.tokens * cuda::kKeyDim *
         (2 * 2 * shape.key_heads + per_value * shape.value_heads);
}

double floor_seconds(const ChunkShape& shape, const GpuCeilings& ceilings) {
  constexpr double kUnitFlops = 2.0 * cuda::kChunkTokens * cuda::kChunkTokens * cuda::kKeyDim;
  const int32_t chunks = shape.requests * shape.tokens / cuda::kChunkTokens;
  const double units = shape.value_heads * kOwnUnits + shape.key_heads * kSharedUnits;
  return std::max(bytes_of(shape) / ceilings.copy_bytes,
                  chunks * units * kUnitFlops / ceilings.matmul_flops);
}

double seconds_of(const ChunkShape& shape, MeasureKernels& kernels, Stream stream) {
  const int32_t tokens = shape.requests * shape.tokens;
  const cuda::ChunkPrefillSetup setup = {
      .kind = shape.is_kda ? cuda::RecurrenceKind::kda : cuda::RecurrenceKind::delta,
      .key_heads = shape.key_heads,
      .value_heads = shape.value_heads,
      .key_dim = cuda::kKeyDim,
      .value_dim = cuda::kKeyDim,
      .sm = kernels.context().info().sm,
      .multiprocessors = kernels.context().info().cores};
  const cuda::ChunkPrefill prefill(setup, cuda::kernel_store());
  const gpu::DeviceBuffer workspace(
      cuda::ChunkPrefill::workspace_bytes(setup, tokens, shape.requests));
  std::vector<cuda::StateSpan> spans;
  for (int32_t i = 0; i < shape.requests; ++i) {
    spans.push_back({i * shape.tokens, (i + 1) * shape.tokens, i, false, true});
  }
  const gpu::DeviceBuffer device_spans = gpu::to_device(spans, stream);
  const cuda::ChunkPrefillBatch batch = {
      .spans = device_spans.data<cuda::StateSpan>(), .requests = shape.requests, .tokens = tokens};
  std::vector<ChunkInputs> layers;
  const auto sets = static_cast<int32_t>(kCacheBytes / static_cast<int64_t>(bytes_of(shape))) + 1;
  for (int32_t i = 0; i < sets; ++i) {
    layers.emplace_back(shape, kernels, static_cast<uint32_t>(100 * i), stream);
  }
  const auto run = [&](int32_t turn, Stream to) {
    const ChunkInputs& layer = layers[static_cast<size_t>(turn % sets)];
    cuda::ChunkPrefillTensors tensors;
    tensors.q = layer.q.data();
    tensors.k = layer.k.data();
    tensors.v = layer.v.data();
    tensors.q_token_stride = tensors.k_token_stride = int64_t{shape.key_heads} * cuda::kKeyDim;
    tensors.v_token_stride = tensors.out_token_stride = int64_t{shape.value_heads} * cuda::kKeyDim;
    tensors.log_decay = layer.log_decay.data<float>();
    tensors.strength = layer.beta.data<float>();
    tensors.state = layer.state.data<float>();
    tensors.state_slot_stride = int64_t{shape.value_heads} * cuda::kKeyDim * cuda::kKeyDim;
    tensors.out = layer.out.data<float>();
    tensors.scale = 0.088388348f;
    tensors.l2_normalise_qk = true;
    prefill.plan(batch, workspace.data(), to);
    prefill.run(batch, tensors, workspace.data(), to);
  };
  return time_on_gpu(run, sets, PowerState::burst, stream).seconds;
}

void print_row(std::string_view name, double seconds, double floor) {
  fmt::print("| {} | {:.1f} | {:.1f} | {:.2f} |\n", name, seconds * 1e6, floor * 1e6,
             floor / seconds);
}

void run_all(std::span<char* const> filters) {
  const auto runs = [&](std::string_view name) {
    return filters.empty() || std::ranges::any_of(filters, [&](std::string_view part) {
             return name.find(part) != std::string_view::npos;
           });
  };
  const gpu::Context context(0);
  MeasureKernels kernels(context);
  const gpu::OwnedStream stream;
  const gpu::DeviceBuffer memory(size_t{4} << 30);
  const GpuCeilings ceilings =
      measure_gpu_ceilings(kernels, memory, PowerState::burst, stream.get());
  fmt::print("| case | us | floor | of floor |\n| --- | ---: | ---: | ---: |\n");
  for (const Shape& shape : kShapes) {
    for (const Load& load : kLoads) {
      const std::string name = fmt::format("{} {}", shape.name, load.name);
      const bool is_kept = load.max_drafts > 0;
      if (!runs(name) || (is_kept && shape.kind == AttentionKind::mamba1)) continue;
      print_row(name, Layers(shape, load, kernels, stream.get()).seconds(stream.get()),
                floor_seconds(shape, load, ceilings));
    }
  }
  for (const ChunkShape& shape : kChunkShapes) {
    if (!runs(shape.name)) continue;
    print_row(shape.name, seconds_of(shape, kernels, stream.get()), floor_seconds(shape, ceilings));
  }
}

}  // namespace
}  // namespace fovea::bench

int main(int count, char** arguments) {
  try {
    fovea::bench::run_all({arguments + 1, arguments + count});
  } catch (const fovea::Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
