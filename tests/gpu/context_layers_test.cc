// SPDX-License-Identifier: Apache-2.0
// Decodes of MLA with projections over two GPUs that write into each other's memory give the result
// of one. Skipped without two GPUs of sm_90.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "core/float_types.h"
#include "dist/context_links.h"
#include "dist/cuda_context_backend.h"
#include "dist/run_ranks.h"
#include "fovea/context_parallel.h"
#include "fovea/gpu.h"
#include "fovea/select_backend.h"
#include "gpu/several_gpus.h"
#include "support/bf16_noise.h"
#include "support/device_array.h"

namespace fovea {
namespace {

using test::bf16_noise;
using test::to_device;
using test::to_host;

constexpr int32_t kHeads = 64, kPageSize = 4, kKvLen = 70, kDim = 128, kQuery = 192, kRow = 576;

size_t index(int64_t i) { return static_cast<size_t>(i); }

// A decode of `requests` tokens: queries of all heads, new keys, weights, and the older keys, which
// it stores one by one.
struct Decode {
  explicit Decode(int32_t count) : requests(count) {
    q = bf16_noise(index(int64_t{requests} * kHeads * kQuery), 1);
    keys = bf16_noise(index(int64_t{requests} * kKvLen * kRow), 2);
    w_uk = bf16_noise(index(int64_t{kHeads} * kDim * 512), 3);
    w_uv = bf16_noise(index(int64_t{kHeads} * kDim * 512), 4);
  }
  int32_t requests;
  std::vector<uint16_t> q, keys, w_uk, w_uv;
};

// A backend on one GPU: alone with all heads, or one of the ranks of these links.
class Layer {
 public:
  Layer(const Decode& decode, int gpu, ContextLinks* links)
      : decode_(decode), gpu_(gpu), ranks_(links == nullptr ? 1 : links->size()) {
    AttentionSpec spec;
    spec.kind = AttentionKind::mla;
    spec.q_heads = kHeads;
    spec.kv_heads = 1;
    spec.mla = {.kv_lora_rank = 512, .rope_dim = 64, .nope_dim = kDim, .v_dim = kDim};
    spec.scores.softmax_scale = 0.02f;
    spec.q_dtype = DType::bf16;
    spec.needs_lse = true;
    const int32_t wide = kPageSize * ranks_;
    pages_ = (kKvLen + wide - 1) / wide;
    pool_ = make_kv_pool({.layout = KvLayout::mla,
                          .dtype = DType::bf16,
                          .layers = 1,
                          .kv_heads = 1,
                          .head_dim = kRow,
                          .head_dim_v = 512,
                          .page_size = kPageSize},
                         decode.requests * pages_ + 1, device());
    const BatchLimits limits{.max_requests = decode.requests,
                             .max_tokens = decode.requests,
                             .max_q_len = 1,
                             .max_kv_len = kKvLen};
    const ContextShards shards{ranks_, 1};
    const BackendRequest request{
        spec, pool_->spec(),
        links == nullptr ? limits : local_limits(shards, limits, DeviceKind::cuda),
        gpu_devices()[index(gpu)]};
    static const BackendRegistry registry = BackendRegistry::builtin();
    backend_ = select_backend(registry, request, {Policy::require, "mla"})
                   .chosen->create({.spec = spec, .kv = pool_.get(), .device = device()});
    if (links != nullptr) {
      heads_ = kHeads / ranks_;
      first_head_ = links->rank() * heads_;
      backend_ = make_cuda_context_backend(
          std::move(backend_), {.spec = spec, .shards = shards, .page_size = kPageSize}, *links);
    }
    backend_->reserve(limits);
  }

  // Stores all keys, each as that of a new token, and returns the outputs of the last one.
  std::vector<uint16_t> run() {
    const int32_t requests = decode_.requests, wide = kPageSize * ranks_;
    const auto q = to_device(decode_.q), w_uk = to_device(decode_.w_uk),
               w_uv = to_device(decode_.w_uv);
    const auto out = to_device(std::vector<uint16_t>(index(requests * heads_ * kDim), 0xffff));
    std::vector<int32_t> indptr(index(requests) + 1), rows(index(requests)), table;
    std::iota(indptr.begin(), indptr.end(), 0);
    std::iota(rows.begin(), rows.end(), 0);
    for (int32_t page = 0; page < requests * pages_; ++page) table.push_back(page + 1);
    const auto d_indptr = to_device(indptr), d_rows = to_device(rows), d_table = to_device(table);
    for (int32_t kv_len = 1; kv_len <= kKvLen; ++kv_len) {
      std::vector<int64_t> slots;
      std::vector<uint16_t> keys;
      for (int32_t i = 0; i < requests; ++i) {
        const int32_t t = kv_len - 1;
        slots.push_back(int64_t{table[index(i * pages_ + t / wide)]} * wide + t % wide);
        const auto at = decode_.keys.begin() + (int64_t{i} * kKvLen + t) * kRow;
        keys.insert(keys.end(), at, at + kRow);
      }
      const auto d_slots = to_device(slots), d_keys = to_device(keys);
      const auto lens = to_device(std::vector<int32_t>(index(requests), kv_len));
      BatchView batch{.mode = ForwardMode::decode, .requests = requests, .tokens = requests};
      batch.q_indptr = d_indptr.span<int32_t>();
      batch.kv_lens = lens.span<int32_t>();
      batch.request_rows = d_rows.span<int32_t>();
      batch.table = {.entries = d_table.data<int32_t>(),
                     .stride = pages_,
                     .entry_tokens = wide,
                     .rows = requests};
      batch.out_slots = {d_slots.data<int64_t>(), index(requests)};
      backend_->plan(batch);
      LayerTensors layer;
      layer.q = {q.data<uint16_t>() + first_head_ * kQuery, DType::bf16, int64_t{kHeads} * kQuery,
                 kQuery};
      layer.out = dense_rows(out.data(), DType::bf16, heads_, kDim);
      layer.mla.latent = dense_rows(d_keys.data(), DType::bf16, 1, kRow);
      layer.mla.k_rope = {d_keys.data<uint16_t>() + 512, DType::bf16, kRow, kRow};
      layer.mla.weights = {.dtype = DType::bf16, .w_uk = w_uk.data(), .w_uv = w_uv.data()};
      const auto lse = to_device(std::vector<float>(index(requests * heads_), 0));
      layer.lse = NaturalLse(lse.data<float>());
      backend_->forward(layer);
      gpu::synchronize(nullptr);
    }
    return to_host<uint16_t>(out, index(requests * heads_ * kDim));
  }

 private:
  Device device() const { return {DeviceKind::cuda, gpu_}; }

  const Decode& decode_;
  int gpu_, ranks_;
  int32_t heads_ = kHeads, first_head_ = 0, pages_ = 0;
  std::unique_ptr<KvPool> pool_;
  std::unique_ptr<AttentionBackend> backend_;
};

// Few requests go through products of few rows, the others through those of many.
TEST(ContextLayers, TwoGpusGiveTheResultOfOne) {
  FOVEA_NEEDS_GPUS(2);
  const std::vector<int> gpus = {0, 1};
  if (gpu_devices()[0].sm != 90) GTEST_SKIP() << "the GPUs are not sm_90";
  if (const std::string why = why_no_peers(gpus); !why.empty()) GTEST_SKIP() << why;
  for (const int32_t requests : {3, 40, 150}) {
    const Decode decode(requests);
    std::vector<uint16_t> whole;
    {
      const gpu::Context context(0);
      whole = Layer(decode, 0, nullptr).run();
    }
    const auto links = make_context_links(gpus);
    std::vector<std::vector<uint16_t>> parts(2);
    test::run_all_ranks(2,
                        [&](Communicator& host) {
                          const auto rank = index(host.rank());
                          const gpu::Context context(gpus[rank]);
                          Layer layer(decode, gpus[rank], links[rank].get());
                          host.barrier();  // drivers may wait for all GPUs while kernels are loaded
                          parts[rank] = layer.run();
                          links[rank]->check();
                          host.barrier();  // nobody frees while others run
                        },
                        {.timeout = std::chrono::minutes(1)});
    double squares = 0, worst = 0;
    for (size_t i = 0; i < whole.size(); ++i) {
      const size_t token = i / (kHeads * kDim), rest = i % (kHeads * kDim);
      const size_t rank = rest / (kHeads / 2 * kDim);
      const size_t at = token * (kHeads / 2 * kDim) + rest % (kHeads / 2 * kDim);
      const double want = bf16_to_float(whole[i]);
      const double difference = std::fabs(bf16_to_float(parts[rank][at]) - want);
      squares += want * want;
      if (!(difference <= worst)) worst = difference;  // NaN, too
    }
    const double mean = std::sqrt(squares / static_cast<double>(whole.size()));
    EXPECT_GT(mean, 0) << requests << " requests";
    EXPECT_LT(worst, 0.1 * mean) << requests << " requests";
  }
}

}  // namespace
}  // namespace fovea
