// SPDX-License-Identifier: Apache-2.0
// Measures the cost of plan() and forward() of GPU backends outside of the attention kernels: their
// host time, with an empty stream before every 32 calls, so that no call waits for the GPU; the GPU
// time of a plan, alone in a graph of 64 (`gpu`) and as the increase of a following forward's time
// (`gpu_in_pass`); and calls of forward enqueued one by one (`gpu_eager`).
#include <benchmark/benchmark.h>

#include <numeric>
#include <random>
#include <vector>

#include "bench/clock.h"
#include "bench/gpu_timing.h"
#include "fovea/error.h"
#include "fovea/gpu.h"
#include "fovea/select_backend.h"
#include "gpu/gpu.h"
#include "kernels/cuda/common/measure_params.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/kernel.h"
#include "kernels/cuda/store.h"

namespace fovea {
namespace {

constexpr int32_t kMaxKvLen = 4096, kPage = 64, kPages = 1024, kLayers = 4;
constexpr int kCalls = 32, kRounds = 100;

// Requests of up to 4096 keys with repeated pages. Calls of forward rotate over the layers.
struct Setting {
  std::string name;
  int32_t requests = 64;
  AttentionKind kind = AttentionKind::mha;
  bool batch_invariant = false;
  int32_t prefix_levels = 0;
  int32_t page_size = kPage;
  int32_t q_len = 1;
  bool by_pages = false;  // the batch has a page table instead of slots
  int32_t decodes = 0;    // additional requests with one new token, for a mixed batch

  AttentionSpec spec() const {
    AttentionSpec spec{.q_heads = 32, .kv_heads = 8, .head_dim = 128, .head_dim_v = 128};
    spec.q_dtype = DType::bf16;
    spec.batch_invariant = batch_invariant;
    if (kind == AttentionKind::mla) {
      spec.kind = kind;
      spec.q_heads = 128;
      spec.kv_heads = 1;
      spec.head_dim = spec.head_dim_v = 0;
      spec.mla.kv_lora_rank = 512;
      spec.mla.rope_dim = 64;
      spec.scores.softmax_scale = 0.07f;  // cannot be derived from absorbed queries
    }
    return spec;
  }
  KvCacheSpec cache() const {
    const AttentionSpec layers = spec();
    KvCacheSpec cache{.dtype = DType::bf16,
                      .layers = kLayers,
                      .kv_heads = layers.kv_heads,
                      .head_dim = layers.head_dim,
                      .head_dim_v = layers.head_dim_v,
                      .page_size = page_size};
    if (kind == AttentionKind::mla) cache.layout = KvLayout::mla;
    return cache;
  }
  int32_t tokens() const { return requests * q_len + decodes; }
  BatchLimits limits() const {
    return {.max_requests = requests + decodes,
            .max_tokens = tokens(),
            .max_q_len = q_len,
            .max_kv_len = kMaxKvLen,
            .prefix_levels = prefix_levels};
  }
};

class Pass {
 public:
  Pass(const BackendEntry& entry, const Setting& setting) : setting_(setting) {
    const int32_t requests = setting.requests + setting.decodes;
    BackendContext context;
    context.spec = setting.spec();
    context.device = find_device("cuda").device();
    pool_ = make_kv_pool(setting.cache(), kPages * kPage / setting.page_size, context.device);
    context.kv = pool_.get();
    backend_ = entry.create(context);
    backend_->reserve(setting.limits());
    std::mt19937 random(1);
    std::vector<int32_t> q_indptr{0}, rows, shared;
    std::vector<int64_t> out_slots(static_cast<size_t>(setting.tokens()));
    std::iota(out_slots.begin(), out_slots.end(), kPage);
    for (int32_t i = 0; i < requests; ++i) {
      rows.push_back(i);
      const int32_t q_len = i < setting.requests ? setting.q_len : 1;
      q_indptr.push_back(q_indptr.back() + q_len);
      q_lens_.push_back(q_len);
      kv_lens_.push_back(q_len + static_cast<int32_t>(random() % (kMaxKvLen - q_len + 1)));
      shared.push_back(
          i == 0 ? 0 : std::min(kv_lens_[static_cast<size_t>(i) - 1], kv_lens_.back()) - 1);
    }
    const int32_t entry_tokens = setting.by_pages ? setting.page_size : 1;
    const int32_t stride = kMaxKvLen / entry_tokens;
    std::vector<int32_t> table;
    for (int32_t i = 0; i < requests * stride; ++i) {
      table.push_back((i * entry_tokens % (kPage * (kPages - 1)) + kPage) / entry_tokens);
    }
    arrays_.push_back(gpu::to_device(q_indptr, nullptr));
    arrays_.push_back(gpu::to_device(kv_lens_, nullptr));
    arrays_.push_back(gpu::to_device(rows, nullptr));
    arrays_.push_back(gpu::to_device(table, nullptr));
    arrays_.push_back(gpu::to_device(out_slots, nullptr));
    arrays_.push_back(gpu::to_device(shared, nullptr));
    batch_ = {.mode = setting.decodes > 0 ? ForwardMode::mixed
                      : setting.q_len > 1 ? ForwardMode::extend
                                          : ForwardMode::decode,
              .requests = requests,
              .tokens = setting.tokens(),
              .q_indptr = arrays_[0].span<int32_t>(),
              .kv_lens = arrays_[1].span<int32_t>(),
              .request_rows = arrays_[2].span<int32_t>(),
              .table = {.entries = arrays_[3].data<int32_t>(),
                        .stride = stride,
                        .entry_tokens = entry_tokens,
                        .rows = requests},
              .out_slots = arrays_[4].span<int64_t>(),
              .hints = {.max_q_len = setting.q_len,
                        .max_kv_len = kMaxKvLen,
                        .host_q_lens = q_lens_,
                        .host_kv_lens = kv_lens_}};
    if (setting.prefix_levels > 0) batch_.hints.shared_prefix = arrays_[5].span<int32_t>();
    const AttentionSpec spec = setting.spec();
    const bool mla = spec.kind == AttentionKind::mla;
    attention_.q = rows_of(spec.q_heads, cached_key_dim(spec));
    attention_.out = rows_of(spec.q_heads, cached_value_dim(spec));
    all_ = attention_;
    (mla ? all_.mla.latent : all_.k) = rows_of(spec.kv_heads, cached_value_dim(spec));
    (mla ? all_.mla.k_rope : all_.v) =
        rows_of(spec.kv_heads, mla ? spec.mla.rope_dim : spec.head_dim_v);
  }

  void plan(Stream stream) { backend_->plan(batch_, stream); }
  void attend(Stream stream) { forward(attention_, stream); }
  void store_and_attend(Stream stream) { forward(all_, stream); }
  Stream stream() const { return stream_.get(); }

 private:
  void forward(LayerTensors& tensors, Stream stream) {
    tensors.layer = turn_++ % kLayers;
    backend_->forward(tensors, stream);
  }
  HeadRows rows_of(int32_t heads, int32_t width) {
    arrays_.emplace_back(static_cast<size_t>(setting_.tokens()) *
                         static_cast<size_t>(heads * width) * 2);
    gpu::fill_bytes(arrays_.back().data(), 0, arrays_.back().bytes(), nullptr);
    gpu::synchronize(nullptr);
    return dense_rows(arrays_.back().data(), DType::bf16, heads, width);
  }

  const gpu::Context context_{0};
  const Setting setting_;
  gpu::OwnedStream stream_;
  std::unique_ptr<KvPool> pool_;
  std::unique_ptr<AttentionBackend> backend_;
  std::vector<gpu::DeviceBuffer> arrays_;
  std::vector<int32_t> q_lens_, kv_lens_;
  BatchView batch_;
  LayerTensors attention_, all_;  // without and with new k and v
  int32_t turn_ = 0;
};

template <typename Call>
void time_calls(benchmark::State& state, Stream stream, Call&& call) {
  call();
  for (auto _ : state) {
    gpu::synchronize(stream);
    const double start = bench::now();
    for (int i = 0; i < kCalls; ++i) call();
    state.SetIterationTime((bench::now() - start) / kCalls);
  }
  gpu::synchronize(stream);
}

// Measures the driver's time for one launch, a lower bound for all calls here.
void time_launches(benchmark::State& state) {
  namespace cuda = kernels::cuda;
  const gpu::Context context(0);
  const gpu::OwnedStream stream;
  const cuda::Kernel empty(
      cuda::make_variant(cuda::family("measure/empty"), {"32"}, context.info().sm),
      cuda::kernel_store());
  const cuda::EmptyParams params{};
  time_calls(state, stream.get(), [&] { empty.launch({}, params, stream.get()); });
}

void add_host(const std::string& name, const BackendEntry& entry, const Setting& setting,
              void (Pass::*call)(Stream)) {
  benchmark::RegisterBenchmark(name.c_str(),
                               [&entry, setting, call](benchmark::State& state) {
                                 try {
                                   Pass pass(entry, setting);
                                   pass.plan(pass.stream());
                                   time_calls(state, pass.stream(),
                                              [&] { (pass.*call)(pass.stream()); });
                                 } catch (const Error& error) {
                                   state.SkipWithError(error.what());
                                 }
                               })
      ->UseManualTime()
      ->Iterations(kRounds);
}

void add_gpu(const std::string& name, const BackendEntry& entry, const Setting& setting,
             bool in_pass) {
  benchmark::RegisterBenchmark(
      name.c_str(),
      [&entry, setting, in_pass](benchmark::State& state) {
        try {
          Pass pass(entry, setting);
          const auto plan = [&](int32_t, Stream stream) { pass.plan(stream); };
          const auto attend = [&](int32_t, Stream stream) { pass.attend(stream); };
          const auto both = [&](int32_t, Stream stream) {
            pass.plan(stream);
            pass.attend(stream);
          };
          plan(0, pass.stream());
          for (auto _ : state) {
            const double seconds = in_pass ? bench::graph_seconds(both, pass.stream()) -
                                                 bench::graph_seconds(attend, pass.stream())
                                           : bench::graph_seconds(plan, pass.stream());
            state.SetIterationTime(std::max(seconds, 0.0));
          }
        } catch (const Error& error) {
          state.SkipWithError(error.what());
        }
      })
      ->UseManualTime()
      ->Iterations(3);
}

// Measures consecutive calls of forward between two events.
void add_eager(const std::string& name, const BackendEntry& entry, const Setting& setting) {
  benchmark::RegisterBenchmark(
      name.c_str(),
      [&entry, setting](benchmark::State& state) {
        try {
          Pass pass(entry, setting);
          pass.plan(pass.stream());
          const auto attend = [&](int32_t, Stream stream) { pass.attend(stream); };
          for (auto _ : state) state.SetIterationTime(bench::eager_seconds(attend, pass.stream()));
        } catch (const Error& error) {
          state.SkipWithError(error.what());
        }
      })
      ->UseManualTime()
      ->Iterations(20);
}

const bool kRegistered = [] {
  if (!why_no_gpu().empty()) return false;
  benchmark::RegisterBenchmark("launch", time_launches)->UseManualTime()->Iterations(kRounds);
  static const BackendRegistry registry = BackendRegistry::builtin();
  const Setting settings[] = {
      {.name = "1", .requests = 1},
      {.name = "64"},
      {.name = "256", .requests = 256},
      {.name = "1_invariant", .requests = 1, .batch_invariant = true},
      {.name = "64_invariant", .batch_invariant = true},
      {.name = "256_invariant", .requests = 256, .batch_invariant = true},
      {.name = "64_shared", .prefix_levels = 1},
      {.name = "64_cascade", .prefix_levels = 4},
      {.name = "64_mixed", .requests = 2, .q_len = kMaxKvLen, .decodes = 64},
      {.name = "64_page_1", .page_size = 1},
      {.name = "256_page_16", .requests = 256, .page_size = 16},
      {.name = "256_page_16_table", .requests = 256, .page_size = 16, .by_pages = true},
      {.name = "16_extend", .requests = 16, .q_len = 64},
      {.name = "64_mla", .kind = AttentionKind::mla},
      {.name = "256_mla", .requests = 256, .kind = AttentionKind::mla}};
  for (const BackendEntry& entry : registry.entries()) {
    for (const Setting& setting : settings) {
      const BackendRequest request{setting.spec(), setting.cache(), setting.limits(),
                                   find_device("cuda")};
      if (!entry.reject(request).empty()) continue;
      const std::string name = entry.name + "/" + setting.name + "/";
      add_host(name + "plan", entry, setting, &Pass::plan);
      add_host(name + "forward", entry, setting, &Pass::attend);
      add_host(name + "forward_storing", entry, setting, &Pass::store_and_attend);
      add_eager(name + "forward/gpu_eager", entry, setting);
      add_gpu(name + "plan/gpu", entry, setting, false);
      add_gpu(name + "plan/gpu_in_pass", entry, setting, true);
    }
  }
  return true;
}();

}  // namespace
}  // namespace fovea

BENCHMARK_MAIN();
