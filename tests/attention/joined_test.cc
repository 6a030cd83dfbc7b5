// SPDX-License-Identifier: Apache-2.0
// Several backends that serve one pass together: layers of different kinds over pools of different
// pages, and separate attention to new and to cached keys.
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "attention/two_requests.h"
#include "fovea/merge_states.h"
#include "fovea/select_backend.h"

namespace fovea {
namespace {

using Fixture = test::TwoRequests;
using test::kContext;
using test::kPage;
using test::kPages;

std::vector<float> random_rows(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> rows(size);
  for (float& x : rows) x = normal(random);
  return rows;
}

// q, k, v and the results of five new tokens.
struct Layer {
  Layer(const AttentionSpec& of, uint32_t seed)
      : spec(of),
        q(random_rows(5u * spec.q_heads * spec.head_dim, seed)),
        k(random_rows(5u * spec.kv_heads * spec.head_dim, seed + 1)),
        v(random_rows(5u * spec.kv_heads * spec.head_dim_v, seed + 2)),
        out(5u * spec.q_heads * spec.head_dim_v, -1),
        lse(5u * spec.q_heads, -1) {}

  LayerTensors tensors(int32_t index = 0) {
    LayerTensors layer{.layer = index,
                       .q = dense_rows(q.data(), DType::f32, spec.q_heads, spec.head_dim),
                       .k = dense_rows(k.data(), DType::f32, spec.kv_heads, spec.head_dim),
                       .v = dense_rows(v.data(), DType::f32, spec.kv_heads, spec.head_dim_v),
                       .out = dense_rows(out.data(), DType::f32, spec.q_heads, spec.head_dim_v)};
    if (spec.needs_lse) layer.lse = NaturalLse(lse.data());
    return layer;
  }

  AttentionSpec spec;
  std::vector<float> q, k, v, out, lse;
};

class Joined : public ::testing::TestWithParam<const char*> {
 protected:
  std::unique_ptr<AttentionBackend> create(const AttentionSpec& spec, KvPool* pool) {
    return registry_.find(GetParam())->create({spec, pool, nullptr, &fixture_.threads});
  }

  const BackendRegistry registry_ = BackendRegistry::builtin();
  Fixture fixture_;
};

// Layers 0 and 2 see all keys, layer 1 sees a window and has other heads and pages.
TEST_P(Joined, LayersOfEveryKindShareABatch) {
  KvCacheSpec caches[] = {fixture_.cache, fixture_.cache};
  AttentionSpec specs[] = {fixture_.spec, fixture_.spec};
  caches[0].layers = 2;
  specs[1].window = 3;
  specs[1].q_heads = 4;
  specs[1].head_dim = caches[1].head_dim = 16;
  caches[1].page_size = kPage / 2;
  const auto pool_of = [&](int group) {
    return make_kv_pool(caches[group], kPages * kPage / caches[group].page_size);
  };
  const std::vector<int32_t> group_of = {0, 1, 0}, place = {0, 0, 1};

  std::vector<Layer> joined, alone;
  for (uint32_t layer = 0; layer < 3; ++layer) joined.emplace_back(specs[group_of[layer]], layer);
  alone = joined;
  const auto full = pool_of(0), window = pool_of(1);
  std::vector<std::unique_ptr<AttentionBackend>> parts;
  parts.push_back(create(specs[0], full.get()));
  parts.push_back(create(specs[1], window.get()));
  const auto all = compose_by_layer(std::move(parts), group_of, place);
  all->reserve(fixture_.limits);
  all->plan(fixture_.batch);
  for (int32_t layer = 0; layer < 3; ++layer) {
    // The composition gets the model's layer, the part its pool's layer.
    all->forward(joined[static_cast<size_t>(layer)].tensors(layer));
  }
  for (size_t layer = 0; layer < 3; ++layer) {
    const auto pool = pool_of(group_of[layer]);
    const auto backend = create(specs[group_of[layer]], pool.get());
    backend->reserve(fixture_.limits);
    backend->plan(fixture_.batch);
    backend->forward(alone[layer].tensors(place[layer]));
    EXPECT_EQ(joined[layer].out, alone[layer].out) << "layer " << layer;
  }
  EXPECT_NE(joined[0].out, joined[2].out);
}

// A ragged prefill of the new tokens and cross attention over the cached tokens, merged by LSE,
// equal an extend. One request has no cached tokens.
TEST_P(Joined, RaggedAndPagedKeysMergeIntoAnExtend) {
  AttentionSpec spec = fixture_.spec;
  spec.needs_lse = true;
  const BatchLimits limits{
      .max_requests = 2, .max_tokens = 7, .max_q_len = 7, .max_kv_len = 16, .max_encoder_len = 16};
  fixture_.kv_lens = {9, 3};
  std::vector<int32_t> cached = {7, 0};
  fixture_.out_slots.resize(2);
  for (const int32_t token : {0, 1, 2})
    fixture_.out_slots.push_back(fixture_.slots[2 * kContext + token]);
  BatchView batch = fixture_.batch;
  batch.out_slots = fixture_.out_slots;
  batch.positions = {};
  batch.masks = {};
  batch.cross.lens = cached;

  const auto pool = make_kv_pool(fixture_.cache, kPages);
  const auto extend = create(spec, pool.get());
  extend->reserve(limits);
  BatchView fill = batch;
  const std::vector<int32_t> fill_indptr = {0, 7, 7};
  const std::vector<int64_t> fill_slots(fixture_.slots.begin() + kContext,
                                        fixture_.slots.begin() + kContext + 7);
  fill.tokens = fill.hints.max_q_len = fill.hints.max_kv_len = 7;
  fill.q_indptr = fill_indptr;
  fill.kv_lens = cached;
  fill.out_slots = fill_slots;
  std::vector<float> k = random_rows(7 * 8, 8), v = random_rows(7 * 8, 9);
  extend->plan(fill);
  extend->forward(
      {.k = dense_rows(k.data(), DType::f32, 1, 8), .v = dense_rows(v.data(), DType::f32, 1, 8)});

  Layer whole(spec, 1), prefix = whole, fresh = whole;
  spec.scope = AttentionScope::cross;
  const auto paged = create(spec, pool.get());
  spec.scope = AttentionScope::ragged;
  const auto ragged = create(spec, nullptr);
  for (AttentionBackend* backend : {paged.get(), ragged.get()}) {
    backend->reserve(limits);
    backend->plan(batch);
  }
  LayerTensors read = prefix.tensors();
  read.k = read.v = {};
  paged->forward(read);
  ragged->forward(fresh.tensors());
  extend->plan(batch);
  extend->forward(whole.tensors());

  const auto merger =
      make_state_merger({DType::f32, spec.q_heads, spec.head_dim_v}, {}, &fixture_.threads);
  const LayerTensors into = fresh.tensors(), part = prefix.tensors();
  merger->merge({into.out, into.lse}, {part.out, part.lse}, batch.tokens);
  for (size_t i = 0; i < whole.out.size(); ++i) EXPECT_NEAR(fresh.out[i], whole.out[i], 1e-6) << i;
  for (size_t i = 0; i < whole.lse.size(); ++i) EXPECT_NEAR(fresh.lse[i], whole.lse[i], 1e-6) << i;
  EXPECT_NE(prefix.out, whole.out);
}

INSTANTIATE_TEST_SUITE_P(Backends, Joined, ::testing::Values("cpu", "reference"),
                         [](const auto& name) { return std::string(name.param); });

}  // namespace
}  // namespace fovea
