// SPDX-License-Identifier: Apache-2.0
// An engine with its own KV memory and block tables in the layout of vLLM. Fovea attends over them
// in place: two prompts of different length in one pass, then a decode step of both. The results
// are compared with those over a pool of the library.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <random>
#include <vector>

#include "fovea/select_backend.h"

namespace {

using namespace fovea;

constexpr int32_t kQHeads = 8, kKvHeads = 2, kHeadDim = 64, kPageSize = 16;
constexpr int64_t kPages = 12;  // page 0 is reserved

// The engine's memory for each layer: [2 (K, V), pages, page_size, kv_heads, head_dim].
class LentPool final : public KvPool {
 public:
  LentPool(const KvCacheSpec& spec, std::vector<float*> layers)
      : spec_(spec), layers_(std::move(layers)) {}

  const KvCacheSpec& spec() const override { return spec_; }
  int64_t pages() const override { return kPages; }
  KvLayerView layer(int32_t index) const override {
    KvLayerView view;
    view.dtype = spec_.dtype;
    view.page_size = spec_.page_size;
    view.slots = kPages * spec_.page_size;
    view.k_head_stride = view.v_head_stride = spec_.head_dim;  // in elements
    view.k_token_stride = view.v_token_stride = spec_.kv_heads * view.k_head_stride;
    view.k_page_stride = view.v_page_stride = spec_.page_size * view.k_token_stride;
    float* const keys = layers_.at(static_cast<size_t>(index));
    view.k = reinterpret_cast<char*>(keys);
    view.v = reinterpret_cast<char*>(keys + kPages * view.k_page_stride);
    return view;
  }

 private:
  KvCacheSpec spec_;
  std::vector<float*> layers_;
};

// The engine's block table [requests, 4], which also determines where new tokens are stored.
const std::vector<int32_t> kBlockTable = {7, 3, 11, 0, 5, 9, 0, 0};
int64_t slot_of(int32_t request, int32_t token) {
  return int64_t{kBlockTable[request * 4 + token / kPageSize]} * kPageSize + token % kPageSize;
}

struct Pass {
  ForwardMode mode;
  std::vector<int32_t> new_tokens, lengths;  // per request; lengths include the new tokens
};

std::vector<float> random_values(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

std::vector<float> run(AttentionBackend& backend, const Pass& pass, uint32_t seed) {
  std::vector<int32_t> q_indptr = {0}, rows;
  std::vector<int64_t> out_slots;
  for (int32_t request = 0; request < static_cast<int32_t>(pass.lengths.size()); ++request) {
    rows.push_back(request);
    const int32_t length = pass.lengths[request], fresh = pass.new_tokens[request];
    q_indptr.push_back(q_indptr.back() + fresh);
    for (int32_t token = length - fresh; token < length; ++token) {
      out_slots.push_back(slot_of(request, token));
    }
  }
  BatchView batch{.mode = pass.mode,
                  .requests = static_cast<int32_t>(rows.size()),
                  .tokens = q_indptr.back(),
                  .q_indptr = q_indptr,
                  .kv_lens = pass.lengths,
                  .request_rows = rows,
                  .out_slots = out_slots};
  batch.table = {.entries = kBlockTable.data(), .stride = 4, .entry_tokens = kPageSize, .rows = 2};
  backend.plan(batch);

  const auto tokens = static_cast<size_t>(batch.tokens);
  std::vector<float> q = random_values(tokens * kQHeads * kHeadDim, seed);
  std::vector<float> k = random_values(tokens * kKvHeads * kHeadDim, seed + 1);
  std::vector<float> v = random_values(tokens * kKvHeads * kHeadDim, seed + 2);
  std::vector<float> out(q.size());
  backend.forward({.q = dense_rows(q.data(), DType::f32, kQHeads, kHeadDim),
                   .k = dense_rows(k.data(), DType::f32, kKvHeads, kHeadDim),
                   .v = dense_rows(v.data(), DType::f32, kKvHeads, kHeadDim),
                   .out = dense_rows(out.data(), DType::f32, kQHeads, kHeadDim)});
  return out;
}

}  // namespace

int main() {
  ThreadPool threads(2);
  BackendRequest request;
  request.spec = {.q_heads = kQHeads, .kv_heads = kKvHeads};
  request.spec.head_dim = request.spec.head_dim_v = kHeadDim;
  request.cache = {.layers = 1, .kv_heads = kKvHeads};
  request.cache.head_dim = request.cache.head_dim_v = kHeadDim;
  request.cache.page_size = kPageSize;
  request.limits = {.max_requests = 2, .max_tokens = 64, .max_q_len = 64, .max_kv_len = 64};
  request.device = cpu_device();
  request.device.cores = threads.size();
  const BackendRegistry registry = BackendRegistry::builtin();

  std::vector<float> memory(2 * kPages * kPageSize * kKvHeads * kHeadDim);
  LentPool lent(request.cache, {memory.data()});
  const Selection chosen = select_backend(registry, request);
  const auto backend =
      chosen.chosen->create({.spec = request.spec, .kv = &lent, .threads = &threads});
  backend->reserve(request.limits);

  const auto own = make_kv_pool(request.cache, kPages);
  const Selection oracle = select_backend(registry, request, {Policy::require, "reference"});
  const auto reference =
      oracle.chosen->create({.spec = request.spec, .kv = own.get(), .threads = &threads});
  reference->reserve(request.limits);

  float difference = 0;
  uint32_t seed = 1;
  for (const Pass& pass : {Pass{ForwardMode::extend, {37, 17}, {37, 17}},
                           Pass{ForwardMode::decode, {1, 1}, {38, 18}}}) {
    const std::vector<float> out = run(*backend, pass, seed);
    const std::vector<float> expected = run(*reference, pass, seed++);
    for (size_t i = 0; i < out.size(); ++i) {
      difference = std::max(difference, std::fabs(out[i] - expected[i]));
    }
  }
  std::cout << chosen.chosen->name << " over the engine's memory differs from reference by "
            << difference << "\n";
  return difference < 1e-5f ? 0 : 1;
}
