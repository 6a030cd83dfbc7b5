// SPDX-License-Identifier: Apache-2.0
// Time the host spends in plan() and forward() of a GPU backend, for one decode of 64 requests. The
// stream is empty before every 32 calls, so no call waits for the GPU.
#include <benchmark/benchmark.h>

#include <chrono>
#include <numeric>
#include <vector>

#include "fovea/gpu.h"
#include "fovea/select_backend.h"
#include "gpu/gpu.h"
#include "kernels/cuda/common/measure_params.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/kernel.h"
#include "kernels/cuda/store.h"

namespace fovea {
namespace {

constexpr int32_t kRequests = 64, kLength = 512, kPage = 16;
constexpr int kCalls = 32, kRounds = 300;

template <typename T>
gpu::DeviceBuffer on_device(const std::vector<T>& values) {
  gpu::DeviceBuffer buffer(values.size() * sizeof(T));
  gpu::copy_to_device(buffer.data(), values.data(), buffer.bytes(), nullptr);
  gpu::synchronize(nullptr);
  return buffer;
}

class Decode {
 public:
  explicit Decode(const BackendEntry& entry) {
    BackendContext context;
    context.spec = spec();
    context.device = find_device("cuda").device();
    pool_ = make_kv_pool(cache(), kRequests * kLength / kPage + 1, context.device);
    context.kv = pool_.get();
    backend_ = entry.create(context);
    backend_->reserve(limits());
    std::vector<int32_t> q_indptr(kRequests + 1), rows(kRequests), slots(kRequests * kLength);
    std::iota(q_indptr.begin(), q_indptr.end(), 0);
    std::iota(rows.begin(), rows.end(), 0);
    std::iota(slots.begin(), slots.end(), kPage);
    std::vector<int64_t> out_slots;
    for (int32_t i = 1; i <= kRequests; ++i) out_slots.push_back(kPage + int64_t{i} * kLength - 1);
    arrays_.push_back(on_device(q_indptr));
    arrays_.push_back(on_device(std::vector<int32_t>(kRequests, kLength)));
    arrays_.push_back(on_device(rows));
    arrays_.push_back(on_device(slots));
    arrays_.push_back(on_device(out_slots));
    batch_ = {.mode = ForwardMode::decode,
              .requests = kRequests,
              .tokens = kRequests,
              .max_q_len = 1,
              .max_kv_len = kLength,
              .q_indptr = arrays_[0].data<int32_t>(),
              .kv_lens = arrays_[1].data<int32_t>(),
              .request_rows = arrays_[2].data<int32_t>(),
              .request_slots = arrays_[3].data<int32_t>(),
              .request_slots_stride = kLength,
              .out_slots = arrays_[4].data<int64_t>()};
    tensors_.q = rows_of(spec().q_heads);
    tensors_.k = rows_of(spec().kv_heads);
    tensors_.v = rows_of(spec().kv_heads);
    tensors_.out = rows_of(spec().q_heads);
  }

  static AttentionSpec spec() {
    AttentionSpec spec{.q_heads = 32, .kv_heads = 8, .head_dim = 128, .head_dim_v = 128};
    spec.q_dtype = DType::bf16;
    return spec;
  }
  static KvCacheSpec cache() {
    return {.dtype = DType::bf16,
            .layers = 1,
            .kv_heads = 8,
            .head_dim = 128,
            .head_dim_v = 128,
            .page_size = kPage};
  }
  static BatchLimits limits() {
    return {
        .max_requests = kRequests, .max_tokens = kRequests, .max_q_len = 1, .max_kv_len = kLength};
  }

  void plan() { backend_->plan(batch_, stream_.get()); }
  void forward() { backend_->forward(tensors_, stream_.get()); }
  void wait() const { gpu::synchronize(stream_.get()); }

 private:
  HeadRows rows_of(int32_t heads) {
    arrays_.emplace_back(static_cast<size_t>(kRequests) * heads * 128 * 2);
    gpu::fill_bytes(arrays_.back().data(), 0, arrays_.back().bytes(), nullptr);
    return dense_rows(arrays_.back().data(), DType::bf16, heads, 128);
  }

  const gpu::Context context_{0};
  gpu::OwnedStream stream_;
  std::unique_ptr<KvPool> pool_;
  std::unique_ptr<AttentionBackend> backend_;
  std::vector<gpu::DeviceBuffer> arrays_;
  BatchView batch_;
  LayerTensors tensors_;
};

template <typename Call>
void time_calls(benchmark::State& state, const BackendEntry& entry, Call&& call) {
  Decode decode(entry);
  decode.plan();
  decode.forward();
  for (auto _ : state) {
    decode.wait();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) call(decode);
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    state.SetIterationTime(elapsed.count() / kCalls);
  }
  decode.wait();
}

BackendRequest request() {
  return {Decode::spec(), Decode::cache(), Decode::limits(), find_device("cuda")};
}

// What the driver takes for one launch: the floor of all calls here.
void time_launches(benchmark::State& state) {
  namespace cuda = kernels::cuda;
  const gpu::Context context(0);
  const gpu::OwnedStream stream;
  const cuda::Kernel empty(
      cuda::make_variant(cuda::family("measure/empty"), {"32"}, context.info().sm),
      cuda::kernel_store());
  const cuda::EmptyParams params{};
  empty.launch({}, params, stream.get());
  for (auto _ : state) {
    gpu::synchronize(stream.get());
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) empty.launch({}, params, stream.get());
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    state.SetIterationTime(elapsed.count() / kCalls);
  }
  gpu::synchronize(stream.get());
}

// One pair of timings for every backend that serves the decode.
const bool kRegistered = [] {
  if (!why_no_gpu().empty()) return false;
  benchmark::RegisterBenchmark("launch", time_launches)->UseManualTime()->Iterations(kRounds);
  static const BackendRegistry registry = BackendRegistry::builtin();
  for (const BackendEntry& entry : registry.entries()) {
    if (!entry.reject(request()).empty()) continue;
    const auto add = [&](const std::string& name, auto call) {
      benchmark::RegisterBenchmark(
          (entry.name + "/" + name).c_str(),
          [&entry, call](benchmark::State& state) { time_calls(state, entry, call); })
          ->UseManualTime()
          ->Iterations(kRounds);
    };
    add("plan", [](Decode& decode) { decode.plan(); });
    add("forward", [](Decode& decode) { decode.forward(); });
  }
  return true;
}();

}  // namespace
}  // namespace fovea

BENCHMARK_MAIN();
