// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_contexts.h"

#include <cmath>
#include <memory>
#include <numeric>
#include <utility>

#include "bench/gpu_cache.h"
#include "bench/gpu_ceilings.h"
#include "bench/rank_timing.h"
#include "core/check.h"
#include "core/float_types.h"
#include "dist/cuda_context_backend.h"
#include "dist/cuda_context_exchange.h"
#include "fovea/gpu.h"
#include "fovea/select_backend.h"

namespace fovea::bench {
namespace {

constexpr int32_t kPageSize = 64;

size_t index(int64_t i) { return static_cast<size_t>(i); }

// Noise in bf16 on the current GPU.
gpu::DeviceBuffer noise(MeasureKernels& kernels, int64_t count, uint32_t seed, float factor) {
  gpu::DeviceBuffer values(index(count) * sizeof(uint16_t));
  kernels.fill_noise(values.data(), DType::bf16, count, seed, factor, 0, nullptr);
  return values;
}

struct Shape {
  const char* name;
  int32_t tokens, heads, q_dim, dim;  // heads of one rank
};

ContextTime measure_exchange(const ModelRanks& links, int gpu, const Shape& shape,
                             ContextLinks& over_nccl, MeasureKernels& kernels) {
  const int32_t all = shape.heads * links.communicator->size();
  const int64_t rows = int64_t{shape.tokens} * shape.heads;
  const auto q = noise(kernels, rows * shape.q_dim, 1, 1);
  const auto part = noise(kernels, int64_t{shape.tokens} * all * shape.dim, 2, 1);
  const gpu::DeviceBuffer all_q(q.bytes() * index(links.communicator->size())),
      merged(index(rows * shape.dim) * sizeof(uint16_t)),
      lse(index(int64_t{shape.tokens} * all) * sizeof(float));
  kernels.fill_noise(lse.data(), DType::f32, int64_t{shape.tokens} * all, 3, 2, 0, nullptr);
  gpu::synchronize(nullptr);
  const gpu::OwnedStream stream;
  ContextTime time;
  time.shape = shape.name;
  time.query_bytes = q.bytes();
  time.state_bytes = merged.bytes() + index(rows) * sizeof(float);
  const auto measure = [&](ContextLinks& own, double& queries, double& states) {
    CudaContextExchange exchange({.dtype = DType::bf16,
                                  .heads = shape.heads,
                                  .q_dim = shape.q_dim,
                                  .dim = shape.dim,
                                  .max_tokens = shape.tokens,
                                  .device = {DeviceKind::cuda, gpu}},
                                 own);
    queries = time_calls(*links.host, stream.get(), [&] {
      exchange.gather_queries(dense_rows(q.data(), DType::bf16, shape.heads, shape.q_dim),
                              dense_rows(all_q.data(), DType::bf16, all, shape.q_dim), shape.tokens,
                              stream.get());
    });
    states = time_calls(*links.host, stream.get(), [&] {
      exchange.merge(
          {dense_rows(part.data(), DType::bf16, all, shape.dim), NaturalLse(lse.data<float>())},
          {dense_rows(merged.data(), DType::bf16, shape.heads, shape.dim), {}}, shape.tokens,
          nullptr, stream.get());
    });
  };
  if (links.contexts != nullptr) measure(*links.contexts, time.own_queries, time.own_states);
  measure(over_nccl, time.nccl_queries, time.nccl_states);
  links.host->barrier();  // nobody frees while others run
  return time;
}

// Decodes of 128 heads in the form with projections.
AttentionSpec mla_spec() {
  AttentionSpec spec;
  spec.kind = AttentionKind::mla;
  spec.q_heads = 128;
  spec.kv_heads = 1;
  spec.mla = {.kv_lora_rank = 512, .rope_dim = 64, .nope_dim = 128, .v_dim = 128};
  spec.scores.softmax_scale = 1 / std::sqrt(192.0f);
  spec.q_dtype = DType::bf16;
  spec.needs_lse = true;
  return spec;
}

// One rank, alone with all keys or with its own part of them.
class MlaLayer {
 public:
  MlaLayer(int gpu, int32_t requests, int32_t kv_len, ContextLinks* links)
      : spec_(mla_spec()),
        requests_(requests),
        kv_len_(kv_len),
        ranks_(links == nullptr ? 1 : links->size()),
        gpu_(gpu) {
    const int64_t wide = int64_t{kPageSize} * ranks_;
    pages_of_request_ = (kv_len + wide - 1) / wide;
    const KvCacheSpec cache{.layout = KvLayout::mla,
                            .dtype = DType::bf16,
                            .layers = 1,
                            .kv_heads = 1,
                            .head_dim = 576,
                            .head_dim_v = 512,
                            .page_size = kPageSize};
    pool_ = make_kv_pool(cache, requests * pages_of_request_ + 1, device());
    const BatchLimits limits{
        .max_requests = requests, .max_tokens = requests, .max_q_len = 1, .max_kv_len = kv_len};
    const ContextShards shards{ranks_, 1};
    const BackendRequest request{
        spec_, cache, links == nullptr ? limits : local_limits(shards, limits, DeviceKind::cuda),
        gpu_devices()[index(gpu)]};
    static const BackendRegistry registry = BackendRegistry::builtin();
    backend_ = select_backend(registry, request, {})
                   .chosen->create({.spec = spec_, .kv = pool_.get(), .device = device()});
    if (links != nullptr) {
      backend_ = make_cuda_context_backend(
          std::move(backend_), {.spec = spec_, .shards = shards, .page_size = kPageSize}, *links);
    }
    backend_->reserve(limits);
    make_batch();
  }

  // Fills the cache with this rank's tokens of `keys` [tokens of all requests, 576], which the
  // whole has in the order of its slots.
  void fill(const gpu::DeviceBuffer& keys, int rank) const {
    constexpr size_t kRow = 576 * sizeof(uint16_t);
    const size_t slots = index(requests_ * pages_of_request_) * kPageSize;
    gpu::copy_rows_on_device(static_cast<char*>(pool_->layer(0).k) + kPageSize * kRow,
                             keys.data<char>() + index(rank) * kRow, {index(ranks_) * kRow, kRow},
                             kRow, slots, nullptr);
    gpu::synchronize(nullptr);
  }

  void run(const HeadRows& q, const HeadRows& out, const MlaWeights& weights, float* lse,
           Stream stream) {
    LayerTensors layer;
    layer.q = q;
    layer.out = out;
    layer.lse = NaturalLse(lse);
    layer.save_kv = false;
    layer.mla.weights = weights;
    backend_->forward(layer, stream);
  }
  void plan(Stream stream) { backend_->plan(batch_, stream); }
  AttentionBackend& backend() { return *backend_; }

 private:
  Device device() const { return {DeviceKind::cuda, gpu_}; }

  void make_batch() {
    const int64_t wide = int64_t{kPageSize} * ranks_;
    std::vector<int32_t> indptr(index(requests_) + 1), rows(index(requests_)), table;
    std::iota(indptr.begin(), indptr.end(), 0);
    std::iota(rows.begin(), rows.end(), 0);
    for (int64_t page = 0; page < requests_ * pages_of_request_; ++page) {
      table.push_back(static_cast<int32_t>(page + 1));
    }
    indptr_ = gpu::to_device(indptr, nullptr);
    rows_ = gpu::to_device(rows, nullptr);
    lens_ = gpu::to_device(std::vector<int32_t>(index(requests_), kv_len_), nullptr);
    table_ = gpu::to_device(table, nullptr);
    batch_.mode = ForwardMode::decode;
    batch_.requests = batch_.tokens = requests_;
    batch_.q_indptr = indptr_.span<int32_t>();
    batch_.kv_lens = lens_.span<int32_t>();
    batch_.request_rows = rows_.span<int32_t>();
    batch_.table = {.entries = table_.data<int32_t>(),
                    .stride = pages_of_request_,
                    .entry_tokens = static_cast<int32_t>(wide),
                    .rows = requests_};
    batch_.hints.max_q_len = 1;
    batch_.hints.max_kv_len = kv_len_;
    batch_.hints.prefix_written = true;
  }

  AttentionSpec spec_;
  int32_t requests_, kv_len_, ranks_;
  int gpu_;
  int64_t pages_of_request_ = 0;
  std::unique_ptr<KvPool> pool_;
  std::unique_ptr<AttentionBackend> backend_;
  gpu::DeviceBuffer indptr_, rows_, lens_, table_;
  BatchView batch_;
};

// Largest difference of two arrays relative to the root mean square of the first.
double worst_difference(const gpu::DeviceBuffer& whole, const gpu::DeviceBuffer& own,
                        int64_t tokens, int64_t heads, int64_t first_head, int64_t own_heads) {
  constexpr int64_t kDim = 128;
  std::vector<uint16_t> a(whole.bytes() / 2), b(own.bytes() / 2);
  gpu::copy_to_host(a.data(), whole.data(), whole.bytes(), nullptr);
  gpu::copy_to_host(b.data(), own.data(), own.bytes(), nullptr);
  gpu::synchronize(nullptr);
  double squares = 0, worst = 0;
  for (int64_t row = 0; row < tokens * own_heads; ++row) {
    const int64_t head = row / own_heads * heads + first_head + row % own_heads;
    for (int64_t d = 0; d < kDim; ++d) {
      const double want = bf16_to_float(a[index(head * kDim + d)]);
      const double difference = std::fabs(bf16_to_float(b[index(row * kDim + d)]) - want);
      squares += want * want;
      if (!(difference <= worst)) worst = difference;  // NaN, too
    }
  }
  return worst / std::sqrt(squares / static_cast<double>(tokens * own_heads * kDim));
}

ContextLayerTime measure_layer(const ModelRanks& links, int gpu, int32_t requests, int32_t kv_len,
                               MeasureKernels& kernels) {
  const int rank = links.communicator->rank(), ranks = links.communicator->size();
  const int64_t heads = 128, own = heads / ranks, first = rank * own;
  const auto keys = noise(kernels, int64_t{requests} * kv_len * 576, 1, 1);
  const auto q = noise(kernels, requests * heads * 192, 2, 1);
  const float spread = 1 / std::sqrt(512.0f);
  const auto w_uk = noise(kernels, heads * 128 * 512, 3, spread),
             w_uv = noise(kernels, heads * 128 * 512, 4, spread);
  const MlaWeights weights{.dtype = DType::bf16, .w_uk = w_uk.data(), .w_uv = w_uv.data()};
  const gpu::DeviceBuffer whole_out(index(requests * heads * 128) * 2),
      out(index(requests * own * 128) * 2), lse(index(requests * heads) * 4);
  gpu::fill_bytes(out.data(), 0xff, out.bytes(), nullptr);
  gpu::synchronize(nullptr);
  MlaLayer alone(gpu, requests, kv_len, nullptr);
  alone.fill(keys, 0);
  MlaLayer shared(gpu, requests, kv_len, links.contexts);
  shared.fill(keys, rank);
  const HeadRows all_q = dense_rows(q.data(), DType::bf16, heads, 192);
  const HeadRows own_q{q.data<uint16_t>() + first * 192, DType::bf16, heads * 192, 192};
  const gpu::OwnedStream stream;
  ContextLayerTime time{.requests = requests, .kv_len = kv_len};
  alone.plan(stream.get());
  time.one = time_calls(*links.host, stream.get(), [&] {
    alone.run(all_q, dense_rows(whole_out.data(), DType::bf16, heads, 128), weights,
              lse.data<float>(), stream.get());
  });
  shared.plan(stream.get());
  time.ranks = time_calls(*links.host, stream.get(), [&] {
    shared.run(own_q, dense_rows(out.data(), DType::bf16, own, 128), weights, nullptr,
               stream.get());
  });
  time.worst = worst_difference(whole_out, out, requests, heads, first, own);
  links.host->barrier();  // nobody frees while others run
  return time;
}

}  // namespace

std::vector<ContextTime> measure_exchanges(const ModelRanks& links, int gpu) {
  constexpr Shape kShapes[] = {
      {"GQA, 16 heads of 128, 1 token", 1, 16, 128, 128},
      {"GQA, 16 heads of 128, 64 tokens", 64, 16, 128, 128},
      {"MLA, 64 heads projected, 4 tokens", 4, 64, 192, 128},
      {"MLA, 64 heads projected, 128 tokens", 128, 64, 192, 128},
      {"MLA, 64 heads absorbed, 1 token", 1, 64, 576, 512},
      {"MLA, 64 heads absorbed, 32 tokens", 32, 64, 576, 512},
  };
  const gpu::Context context(gpu);
  MeasureKernels kernels(context);
  ContextLinks over_nccl(*links.communicator, gpu);
  std::vector<ContextTime> times;
  for (const Shape& shape : kShapes) {
    times.push_back(measure_exchange(links, gpu, shape, over_nccl, kernels));
  }
  return times;
}

std::vector<ContextLayerTime> measure_context_layers(const ModelRanks& links, int gpu) {
  std::vector<ContextLayerTime> times;
  if (links.contexts == nullptr) return times;
  const gpu::Context context(gpu);
  MeasureKernels kernels(context);
  for (const auto& [requests, kv_len] : {std::pair{32, 4096}, {128, 4096}, {128, 16384}}) {
    times.push_back(measure_layer(links, gpu, requests, kv_len, kernels));
    constexpr double kTolerance = 0.1;
    if (times.back().worst <= kTolerance) continue;
    fail(ErrorCode::device_failure, "a layer over ranks differs from that of one by {}",
         times.back().worst);
  }
  return times;
}

}  // namespace fovea::bench
