// SPDX-License-Identifier: Apache-2.0
// Multi-head latent attention (MLA): the cache holds one latent and one rotary key for each token,
// and all heads share them. A layer that gives its up-projections lets the backend choose, for each
// request, between absorbing them into q and rebuilding keys and values for every head.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <random>
#include <vector>

#include "fovea/select_backend.h"

namespace {

using namespace fovea;

constexpr int32_t kHeads = 4, kRank = 64, kRope = 16, kNope = 32, kValue = 32;
const KvCacheSpec kCache{.layout = KvLayout::mla,
                         .layers = 1,
                         .kv_heads = 1,
                         .head_dim = kRank + kRope,
                         .head_dim_v = kRank,
                         .page_size = 16};
const BatchLimits kLimits{.max_tokens = 32, .max_q_len = 32, .max_kv_len = 32};

std::vector<float> noise(int32_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 0.3f);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

AttentionSpec spec() {
  AttentionSpec spec{.kind = AttentionKind::mla, .q_heads = kHeads, .kv_heads = 1};
  spec.mla = {.kv_lora_rank = kRank, .rope_dim = kRope, .nope_dim = kNope, .v_dim = kValue};
  return spec;
}

// Reads a prompt of 20 tokens, then decodes two; returns the out of the three passes.
std::vector<float> attend(const char* name) {
  const BackendRegistry registry = BackendRegistry::builtin();
  const Selection choice =
      select_backend(registry, {spec(), kCache, kLimits, cpu_device()}, {Policy::require, name});
  ThreadPool threads;
  const auto pool = make_kv_pool(kCache, /*pages=*/4);
  const auto backend =
      choice.chosen->create({.spec = spec(), .kv = pool.get(), .threads = &threads});
  backend->reserve(kLimits);

  const std::vector<float> w_uk = noise(kHeads * kNope * kRank, 1);
  const std::vector<float> w_uv = noise(kHeads * kValue * kRank, 2);
  const int32_t row = 0, page_table[] = {3, 1};
  int32_t length = 0;
  std::vector<float> result;
  for (const int32_t count : {20, 1, 1}) {
    std::vector<int64_t> out_slots;
    for (int32_t t = 0; t < count; ++t, ++length) {
      out_slots.push_back(page_table[length / 16] * 16 + length % 16);
    }
    const int32_t q_indptr[] = {0, count};
    BatchView batch{.mode = ForwardMode::extend, .requests = 1, .tokens = count};
    batch.q_indptr = q_indptr;
    batch.kv_lens = {&length, 1};
    batch.request_rows = {&row, 1};
    batch.table = {.entries = page_table, .stride = 2, .entry_tokens = 16, .rows = 1};
    batch.out_slots = out_slots;
    backend->plan(batch);

    const auto seed = static_cast<uint32_t>(length);
    std::vector<float> q = noise(count * kHeads * (kNope + kRope), seed);
    std::vector<float> latent = noise(count * kRank, seed + 100);
    std::vector<float> k_rope = noise(count * kRope, seed + 200);  // rotated by the model
    std::vector<float> out(static_cast<size_t>(count * kHeads * kValue));
    LayerTensors layer{.q = dense_rows(q.data(), DType::f32, kHeads, kNope + kRope),
                       .out = dense_rows(out.data(), DType::f32, kHeads, kValue)};
    layer.mla.latent = dense_rows(latent.data(), DType::f32, 1, kRank);
    layer.mla.k_rope = dense_rows(k_rope.data(), DType::f32, 1, kRope);
    layer.mla.weights = {.dtype = DType::f32, .w_uk = w_uk.data(), .w_uv = w_uv.data()};
    backend->forward(layer);
    result.insert(result.end(), out.begin(), out.end());
  }
  return result;
}

}  // namespace

int main() {
  const std::vector<float> fast = attend("cpu"), exact = attend("reference");
  float largest = 0;
  for (size_t i = 0; i < fast.size(); ++i) {
    largest = std::max(largest, std::fabs(fast[i] - exact[i]));
  }
  std::cout << "cpu differs from the fp64 reference by " << largest << "; a token takes "
            << kCache.bytes_per_page() / 16 << " bytes of cache\n";
  return largest < 1e-4f ? 0 : 1;
}
