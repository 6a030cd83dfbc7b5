// SPDX-License-Identifier: Apache-2.0
// Decode steps of two requests on a GPU, as in an engine: one pass over all layers is captured once
// and replayed while the requests grow. Built if the CUDA runtime is available, although Fovea
// itself needs only the driver. Exits with 77 if there is no GPU.
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <iostream>
#include <span>
#include <stdexcept>
#include <vector>

#include "fovea/gpu.h"
#include "fovea/select_backend.h"

namespace {

using namespace fovea;

constexpr int32_t kRequests = 2, kLayers = 2, kSteps = 100;
constexpr int32_t kQHeads = 8, kKvHeads = 2, kHeadDim = 128;

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

// A host array and its copy in device memory, whose address never changes.
template <typename T>
struct Mirrored {
  std::vector<T> host;
  T* device = nullptr;

  explicit Mirrored(size_t count, T value = {}) : host(count, value) {
    check(cudaMalloc(&device, count * sizeof(T)));
    upload(nullptr);
  }
  ~Mirrored() { cudaFree(device); }
  Mirrored(const Mirrored&) = delete;
  Mirrored& operator=(const Mirrored&) = delete;

  void upload(cudaStream_t stream) {
    check(cudaMemcpyAsync(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice,
                          stream));
  }
  void download(cudaStream_t stream) {
    check(cudaMemcpyAsync(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost,
                          stream));
    check(cudaStreamSynchronize(stream));
  }
};

using Bf16 = uint16_t;  // the upper half of an f32
Bf16 to_bf16(float value) { return static_cast<Bf16>(std::bit_cast<uint32_t>(value) >> 16); }
float to_float(Bf16 value) { return std::bit_cast<float>(uint32_t{value} << 16); }

// The tensors that a model would provide. Equal keys have equal weights, so out is the mean of the
// values so far.
struct Tensors {
  Mirrored<Bf16> q{kRequests * kQHeads * kHeadDim, to_bf16(1)};
  Mirrored<Bf16> k{kRequests * kKvHeads * kHeadDim, to_bf16(1)};
  Mirrored<Bf16> v{kRequests * kKvHeads * kHeadDim};
  Mirrored<Bf16> out{kRequests * kQHeads * kHeadDim};

  LayerTensors of_layer(int32_t layer) const {
    return {.layer = layer,
            .q = dense_rows(q.device, DType::bf16, kQHeads, kHeadDim),
            .k = dense_rows(k.device, DType::bf16, kKvHeads, kHeadDim),
            .v = dense_rows(v.device, DType::bf16, kKvHeads, kHeadDim),
            .out = dense_rows(out.device, DType::bf16, kQHeads, kHeadDim)};
  }
};

// The arrays of a decode step. The library's tables keep requests and slots on the host.
class DecodeBatch {
 public:
  DecodeBatch(const KvPool& pool, int32_t max_context)
      : table_(kRequests + 1, max_context),
        pages_(pool.pages(), pool.spec().page_size),
        slots_(static_cast<size_t>(table_.max_requests() * table_.row_stride())) {
    for (int32_t i = 0; i < kRequests; ++i) {
      rows_.host[i] = *table_.allocate();
      q_indptr_.host[i + 1] = i + 1;
    }
    rows_.upload(nullptr);
    q_indptr_.upload(nullptr);
  }

  // Adds a token to each request. Its slot is where the next pass stores k and v.
  void grow(cudaStream_t stream) {
    for (int32_t i = 0; i < kRequests; ++i) {
      int32_t& length = kv_lens_.host[i];
      const std::span<int32_t> row = table_.row(rows_.host[i]);
      std::vector<int64_t> slot;
      if (!pages_.extend(length, length + 1, length > 0 ? row[length - 1] : -1, slot)) {
        throw std::runtime_error("the pool is full");
      }
      row[length++] = static_cast<int32_t>(slot.front());
      out_slots_.host[i] = slot.front();
    }
    std::copy_n(table_.data(), slots_.host.size(), slots_.host.begin());
    kv_lens_.upload(stream);
    out_slots_.upload(stream);
    slots_.upload(stream);
  }

  BatchView view() const {
    TokenTable table = table_.table();
    table.entries = slots_.device;
    return {.mode = ForwardMode::decode,
            .requests = kRequests,
            .tokens = kRequests,
            .q_indptr = {q_indptr_.device, kRequests + 1},
            .kv_lens = {kv_lens_.device, kRequests},
            .request_rows = {rows_.device, kRequests},
            .table = table,
            .out_slots = {out_slots_.device, kRequests}};
  }

 private:
  RequestTable table_;
  PageAllocator pages_;
  Mirrored<int32_t> slots_;
  Mirrored<int32_t> rows_{kRequests}, kv_lens_{kRequests}, q_indptr_{kRequests + 1};
  Mirrored<int64_t> out_slots_{kRequests};
};

// Captures all work of a pass. Replays of the graph read the current contents of the arrays.
cudaGraphExec_t capture_pass(AttentionBackend& backend, const DecodeBatch& batch,
                             const Tensors& tensors, cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t pass = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  backend.plan(batch.view(), stream);
  for (int32_t layer = 0; layer < kLayers; ++layer)
    backend.forward(tensors.of_layer(layer), stream);
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&pass, graph, 0));
  check(cudaGraphDestroy(graph));
  return pass;
}

}  // namespace

int main() {
  if (!why_no_gpu().empty()) {
    std::cout << why_no_gpu() << "\n";
    return 77;
  }
  const DeviceInfo gpu = find_device("cuda");
  KvCacheSpec cache{.dtype = DType::bf16, .layers = kLayers, .kv_heads = kKvHeads};
  cache.head_dim = cache.head_dim_v = kHeadDim;
  cache.page_size = 16;
  const AttentionSpec spec{.q_heads = kQHeads,
                           .kv_heads = kKvHeads,
                           .head_dim = kHeadDim,
                           .head_dim_v = kHeadDim,
                           .q_dtype = DType::bf16};
  const BatchLimits limits{.max_requests = kRequests, .max_tokens = kRequests, .max_kv_len = 1024};
  const BackendRegistry registry = BackendRegistry::builtin();
  const Selection selection = select_backend(registry, {spec, cache, limits, gpu});
  std::cout << selection.explain();

  const auto pool = make_kv_pool(cache, /*pages=*/64, gpu.device());
  const auto backend =
      selection.chosen->create({.spec = spec, .kv = pool.get(), .device = gpu.device()});
  backend->reserve(limits);

  Tensors tensors;
  DecodeBatch batch(*pool, limits.max_kv_len);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  check(cudaDeviceSynchronize());
  const cudaGraphExec_t pass = capture_pass(*backend, batch, tensors, stream);
  for (int32_t step = 1; step <= kSteps; ++step) {
    batch.grow(stream);
    std::fill(tensors.v.host.begin(), tensors.v.host.end(), to_bf16(static_cast<float>(step)));
    tensors.v.upload(stream);
    check(cudaGraphLaunch(pass, stream));
    check(cudaStreamSynchronize(stream));
  }
  tensors.out.download(stream);
  const float mean = (1 + kSteps) / 2.0f;
  std::cout << "after " << kSteps << " steps out[0] = " << to_float(tensors.out.host[0])
            << ", the mean is " << mean << "\n";
  check(cudaGraphExecDestroy(pass));
  check(cudaStreamDestroy(stream));
  return std::fabs(to_float(tensors.out.host[0]) - mean) <= mean / 128 ? 0 : 1;
}
