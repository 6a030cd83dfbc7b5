// SPDX-License-Identifier: Apache-2.0
// Passes on a GPU. A decode step is the replay of a graph: one is captured for each power of two of
// requests, and serves any lengths because all arrays stay where they are. Other passes are
// enqueued. One copy brings the arrays in. Tokens are drawn on the GPU and written to memory of the
// host; logits are copied out where somebody asked for them.
#include <algorithm>
#include <bit>
#include <cstring>
#include <map>

#include "core/check.h"
#include "engine/cuda_batch.h"
#include "engine/graph_addresses.h"

namespace fovea {
namespace {

class CudaModelRunner final : public ModelRunner {
 public:
  CudaModelRunner(ReservedModel model, CacheSet& caches, const ModelRunnerOptions& options);
  void run(std::span<const PassPart> parts, std::span<float> logits,
           std::span<int32_t> drawn) override;
  size_t workspace_bytes() const override;

 private:
  struct Captured {
    gpu::Graph graph;
    std::vector<GraphAddress> addresses;
  };

  void warm_up();
  void capture(int32_t requests);
  void enqueue(const PassSize& size);
  PassSize bucket(int32_t requests) const;
  bool is_decode(std::span<const PassPart> parts) const;
  std::vector<GraphAddress> addresses(const PassSize& size) const;
  bool read_tokens(std::span<const PassPart> parts, std::span<int32_t> drawn) const;
  void read_logits(std::span<float> logits) const;

  Stream stream() const { return model_.model().device().stream(); }
  int32_t vocabulary() const { return model_.model().info().vocabulary; }

  ReservedModel model_;
  CacheSet& caches_;
  BatchLimits limits_;
  CudaBatch batch_;
  gpu::DeviceBuffer logits_;            // [max_tokens, vocabulary]
  gpu::PinnedBuffer readable_;          // [max_requests, vocabulary]: those of a decode step
  std::map<int32_t, Captured> graphs_;  // by requests
};

CudaModelRunner::CudaModelRunner(ReservedModel model, CacheSet& caches,
                                 const ModelRunnerOptions& options)
    : model_(std::move(model)),
      caches_(caches),
      limits_(options.limits),
      batch_(options.limits, caches.table(), model_.model().device().sm()) {
  const auto row_bytes = static_cast<size_t>(vocabulary()) * sizeof(float);
  logits_ = gpu::DeviceBuffer(static_cast<size_t>(limits_.max_tokens) * row_bytes);
  readable_ = gpu::PinnedBuffer(static_cast<size_t>(limits_.max_requests) * row_bytes);
  warm_up();
  if (!options.cuda_graphs) return;
  const int32_t most = std::min(limits_.max_requests, limits_.max_tokens);
  for (int32_t requests = 1; requests < most; requests *= 2) capture(requests);
  capture(most);
}

size_t CudaModelRunner::workspace_bytes() const {
  return model_.workspace_bytes() + batch_.bytes() + logits_.bytes();
}

// Passes of every power of two of rows over the empty requests that the arrays begin with: whatever
// is chosen, loaded or allocated when an operation first runs at a size is so now.
void CudaModelRunner::warm_up() {
  for (int32_t rows = 1;; rows *= 2) {
    PassSize size;
    size.requests = 1;
    size.tokens = size.logit_rows = std::min(rows, limits_.max_tokens);
    enqueue(size);
    gpu::synchronize(stream());
    if (rows >= limits_.max_tokens) return;
  }
}

PassSize CudaModelRunner::bucket(int32_t requests) const {
  const auto rounded = static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(requests)));
  PassSize size;
  size.requests = size.tokens = size.logit_rows =
      std::min({rounded, limits_.max_requests, limits_.max_tokens});
  size.max_q_len = 1;
  size.max_kv_len = limits_.max_kv_len;
  size.mode = ForwardMode::decode;
  size.draws = vocabulary() <= kernels::cuda::kMostVocabulary;
  return size;
}

void CudaModelRunner::capture(int32_t requests) {
  const PassSize size = bucket(requests);
  enqueue(size);
  gpu::synchronize(stream());
  Captured captured;
  captured.graph = gpu::Graph::capture(stream(), [&](Stream) { enqueue(size); });
  captured.addresses = addresses(size);
  graphs_[size.requests] = std::move(captured);
}

void CudaModelRunner::enqueue(const PassSize& size) {
  batch_.record_slots(size, stream());
  const size_t count = static_cast<size_t>(size.logit_rows) * static_cast<size_t>(vocabulary());
  model_.forward(batch_.view(size), batch_.inputs(size), {logits_.data<float>(), count});
  if (size.draws) batch_.draw(size, logits_.data<float>(), vocabulary(), stream());
}

bool CudaModelRunner::is_decode(std::span<const PassPart> parts) const {
  return std::ranges::all_of(
      parts, [](const PassPart& part) { return part.tokens.size() == 1 && part.logit_rows == 1; });
}

void CudaModelRunner::run(std::span<const PassPart> parts, std::span<float> logits,
                          std::span<int32_t> drawn) {
  check_argument(drawn.size() == parts.size(), "drawn holds {}, must hold {} as parts does",
                 drawn.size(), parts.size());
  std::ranges::fill(drawn, -1);
  if (parts.empty()) return;
  PassSize size = batch_.fill(parts, caches_.table());
  size.draws = size.draws && vocabulary() <= kernels::cuda::kMostVocabulary;
  check_argument(
      logits.size() == static_cast<size_t>(size.logit_rows) * static_cast<size_t>(vocabulary()),
      "logits holds {} floats, must hold {} rows of {}", logits.size(), size.logit_rows,
      vocabulary());
  const bool replays = !graphs_.empty() && is_decode(parts);
  if (replays) {
    const PassSize padded = bucket(size.requests);
    batch_.pad(size, padded);
    size = padded;
  }
  caches_.publish_slot_maps(stream());
  batch_.upload(parts, caches_.table(), stream());
  if (replays) {
    const Captured& captured = graphs_.at(size.requests);
#ifndef NDEBUG
    check_addresses(captured.addresses, addresses(size), size.requests);
#endif
    captured.graph.launch(stream());
  } else {
    enqueue(size);
  }
  if (!size.draws || !read_tokens(parts, drawn)) read_logits(logits);
}

// Whether nobody needs logits.
bool CudaModelRunner::read_tokens(std::span<const PassPart> parts, std::span<int32_t> drawn) const {
  gpu::synchronize(stream());
  bool all = true;
  for (size_t i = 0; i < parts.size(); ++i) {
    drawn[i] = batch_.drawn(i);
    all = all && (drawn[i] >= 0 || parts[i].logit_rows == 0);
  }
  return all;
}

void CudaModelRunner::read_logits(std::span<float> logits) const {
  const bool fits = logits.size_bytes() <= readable_.bytes();
  float* const to = fits ? readable_.data<float>() : logits.data();
  gpu::copy_to_host(to, logits_.data(), logits.size_bytes(), stream());
  gpu::synchronize(stream());
  if (fits) std::memcpy(logits.data(), to, logits.size_bytes());
}

std::vector<GraphAddress> CudaModelRunner::addresses(const PassSize& size) const {
  const BatchView view = batch_.view(size);
  const ModelInputs inputs = batch_.inputs(size);
  std::vector<GraphAddress> found = {{.array = "q_indptr", .address = view.q_indptr},
                                     {.array = "kv_lens", .address = view.kv_lens},
                                     {.array = "request_rows", .address = view.request_rows},
                                     {.array = "request_slots", .address = view.request_slots},
                                     {.array = "out_slots", .address = view.out_slots},
                                     {.array = "tokens", .address = inputs.tokens.data()},
                                     {.array = "positions", .address = inputs.positions.data()},
                                     {.array = "logit_rows", .address = inputs.logit_rows.data()},
                                     {.array = "draws", .address = batch_.draws()},
                                     {.array = "logits", .address = logits_.data()}};
  for (int32_t group = 0; group < std::ssize(model_.model().info().groups); ++group) {
    const KvPool* const pool = caches_.kv(static_cast<size_t>(group));
    if (pool == nullptr) continue;
    found.push_back({"the slot map", group, -1, pool->device_slot_map()});
    for (int32_t layer = 0; layer < pool->spec().layers; ++layer) {
      const KvLayerView cache = pool->layer(layer);
      found.push_back({"k", group, layer, cache.k});
      found.push_back({"v", group, layer, cache.v});
      found.push_back({"k_scale", group, layer, cache.k_scale});
      found.push_back({"v_scale", group, layer, cache.v_scale});
    }
  }
  return found;
}

}  // namespace

std::unique_ptr<ModelRunner> make_cuda_model_runner(ReservedModel model, CacheSet& caches,
                                                    const ModelRunnerOptions& options) {
  return std::make_unique<CudaModelRunner>(std::move(model), caches, options);
}

}  // namespace fovea
