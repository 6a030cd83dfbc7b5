// SPDX-License-Identifier: Apache-2.0
// A layer whose context is on several ranks gives the result of one rank, on one GPU: the ranks run
// one after the other, again and again, until each has got what the others send. Skipped without a
// GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "core/float_types.h"
#include "fovea/context_parallel.h"
#include "fovea/gpu.h"
#include "fovea/select_backend.h"
#include "support/device_array.h"
#include "support/random_values.h"

namespace fovea {
namespace {

using test::to_device;
using test::to_host;

constexpr int32_t kPageSize = 4, kPages = 40, kMaxTokens = 24, kMaxKv = 60;

size_t index(int64_t i) { return static_cast<size_t>(i); }

// Messages that all ranks have sent, call by call.
using Sent = std::vector<std::vector<std::vector<char>>>;

// Gives a rank what the others have sent when they ran last.
class Replayed final : public Communicator {
 public:
  Replayed(int rank, int size, Sent& sent) : Communicator(rank, size), sent_(sent) {}
  std::string_view name() const override { return "replayed"; }
  DeviceKind device() const override { return DeviceKind::cuda; }
  void abort(std::string_view) override {}
  void check() override {}
  void begin() { call_ = 0; }

 protected:
  void run_all_gather(const Exchange& call, Stream stream) override {
    exchange(call, call.bytes, 0, stream);
  }
  void run_all_to_all(const Exchange& call, Stream stream) override {
    exchange(call, call.bytes * index(size()), index(rank()) * call.bytes, stream);
  }
  void run_all_reduce(const Reduction&, Stream) override { FAIL(); }
  void run_reduce_scatter(const Reduction&, Stream) override { FAIL(); }
  void run_broadcast(void*, size_t, int, Stream) override { FAIL(); }
  void run_barrier(Stream) override { FAIL(); }

 private:
  // at: where the part for this rank begins in what another rank has sent.
  void exchange(const Exchange& call, size_t sent_bytes, size_t at, Stream stream) {
    if (sent_.size() <= call_) sent_.emplace_back(index(size()));
    auto& messages = sent_[call_++];
    std::vector<char>& own = messages[index(rank())];
    own.resize(sent_bytes);
    gpu::copy_to_host(own.data(), call.send, sent_bytes, stream);
    gpu::synchronize(stream);
    for (int other = 0; other < size(); ++other) {
      const std::vector<char>& theirs = messages[index(other)];
      if (theirs.size() != sent_bytes) continue;  // it has not run yet
      gpu::copy_to_device(static_cast<char*>(call.receive) + index(other) * call.bytes,
                          theirs.data() + at, call.bytes, stream);
    }
    gpu::synchronize(stream);
  }

  Sent& sent_;
  size_t call_ = 0;
};

std::vector<uint16_t> random_bf16(int64_t count, uint32_t seed) {
  std::vector<uint16_t> values;
  for (const float value : test::random_values(index(count), seed, -1, 1)) {
    values.push_back(float_to_bf16(value));
  }
  return values;
}

struct Layers {
  const char* backend;
  AttentionSpec spec;  // with all heads

  int32_t q_dim() const {
    return is_mla() ? spec.mla.kv_lora_rank + spec.mla.rope_dim : spec.head_dim;
  }
  int32_t out_dim() const { return is_mla() ? spec.mla.kv_lora_rank : spec.head_dim_v; }
  bool is_mla() const { return spec.kind == AttentionKind::mla; }
  KvCacheSpec cache(int32_t page_size) const {
    return {.layout = is_mla() ? KvLayout::mla : KvLayout::mha,
            .dtype = DType::bf16,
            .layers = 1,
            .kv_heads = spec.kv_heads,
            .head_dim = q_dim(),
            .head_dim_v = out_dim(),
            .page_size = page_size};
  }
};

// A pass over three requests, whose rows in the table are 2, 0 and 1. Lengths end with the pass.
struct Pass {
  ForwardMode mode;
  std::vector<int32_t> q_lens, kv_lens;
  bool hints = false;

  int32_t tokens() const { return q_lens[0] + q_lens[1] + q_lens[2]; }
};

// A backend with a pool; the whole is a single rank.
class Rank {
 public:
  Rank(const Layers& layers, const ContextShards& shards, int rank, Sent* sent)
      : layers_(layers), shards_(shards), threads_(1) {
    const int32_t page_size = sent != nullptr ? kPageSize : kPageSize * shards.ranks;
    pool_ = make_kv_pool(layers.cache(page_size), kPages, {DeviceKind::cuda, 0});
    const BatchLimits limits{
        .max_requests = 3, .max_tokens = kMaxTokens, .max_q_len = 20, .max_kv_len = kMaxKv};
    BackendRequest request{layers.spec, pool_->spec(), limits, gpu_devices()[0]};
    if (sent != nullptr) request.limits = local_limits(shards, limits, DeviceKind::cuda);
    static const BackendRegistry registry = BackendRegistry::builtin();
    const Selection chosen = select_backend(registry, request, {Policy::require, layers.backend});
    backend_ = chosen.chosen->create(
        {.spec = layers.spec, .kv = pool_.get(), .device = {DeviceKind::cuda, 0}});
    if (sent != nullptr) {
      replayed_ = std::make_unique<Replayed>(rank, shards.ranks, *sent);
      backend_ = make_context_backend(
          std::move(backend_), {.spec = layers.spec, .shards = shards, .page_size = kPageSize},
          *replayed_, threads_);
      first_head_ = rank * heads();
    }
    backend_->reserve(limits);
    for (int32_t t = 0; t < 3 * kMaxKv; ++t) {
      const int32_t wide = kPageSize * shards.ranks, page = t / kMaxKv * 13 + t % kMaxKv / wide;
      table_.push_back((page * 7 % (kPages - 1) + 1) * wide + t % kMaxKv % wide);
    }
  }

  int32_t heads() const {
    return replayed_ == nullptr ? layers_.spec.q_heads : layers_.spec.q_heads / shards_.ranks;
  }

  // Returns the outputs of the rank's heads; all of them get the same values.
  std::vector<uint16_t> run(const Pass& pass, uint32_t seed, const std::vector<float>& all_sinks) {
    if (replayed_ != nullptr) replayed_->begin();
    const int32_t tokens = pass.tokens(), all = layers_.spec.q_heads, dim = layers_.q_dim();
    std::vector<int32_t> indptr = {0};
    const std::vector<int32_t> rows = {2, 0, 1};
    std::vector<int64_t> slots;
    for (size_t i = 0; i < 3; ++i) {
      indptr.push_back(indptr.back() + pass.q_lens[i]);
      for (int32_t j = pass.kv_lens[i] - pass.q_lens[i]; j < pass.kv_lens[i]; ++j) {
        slots.push_back(table_[index(rows[i] * kMaxKv + j)]);
      }
    }
    const auto d_indptr = to_device(indptr), d_lens = to_device(pass.kv_lens),
               d_rows = to_device(rows), d_slots = to_device(slots), d_table = to_device(table_);
    const auto q = to_device(random_bf16(int64_t{tokens} * all * dim, seed));
    const int64_t kv_width = int64_t{layers_.spec.kv_heads} * dim;
    const auto k = to_device(random_bf16(tokens * kv_width, seed + 1));
    const auto v = to_device(random_bf16(tokens * kv_width, seed + 2));
    const auto out =
        to_device(std::vector<uint16_t>(index(tokens * heads() * layers_.out_dim()), 0xffff));
    const auto lse = to_device(std::vector<float>(index(tokens * heads()), 0));
    const auto sinks = to_device(all_sinks);

    BatchView batch{.mode = pass.mode, .requests = 3, .tokens = tokens};
    batch.q_indptr = d_indptr.span<int32_t>().first(4);
    batch.kv_lens = d_lens.span<int32_t>().first(3);
    batch.request_rows = d_rows.span<int32_t>().first(3);
    batch.table = {.entries = d_table.data<int32_t>(), .stride = kMaxKv, .rows = 3};
    batch.out_slots = {d_slots.data<int64_t>(), index(tokens)};
    if (pass.hints) {
      batch.hints.max_q_len = *std::ranges::max_element(pass.q_lens);
      batch.hints.max_kv_len = *std::ranges::max_element(pass.kv_lens);
      batch.hints.host_q_lens = pass.q_lens;
      batch.hints.host_kv_lens = pass.kv_lens;
      batch.hints.prefix_written = true;
    }
    backend_->plan(batch);
    LayerTensors layer;
    layer.q = {q.data<uint16_t>() + first_head_ * dim, DType::bf16, int64_t{all} * dim, dim};
    layer.out = dense_rows(out.data(), DType::bf16, heads(), layers_.out_dim());
    layer.lse = NaturalLse(lse.data<float>());
    if (!all_sinks.empty()) layer.scores.sinks = sinks.data<float>() + first_head_;
    if (layers_.is_mla()) {
      layer.mla.latent = dense_rows(k.data(), DType::bf16, 1, dim);
      layer.mla.k_rope = {k.data<uint16_t>() + layers_.spec.mla.kv_lora_rank, DType::bf16, dim,
                          dim};
    } else {
      layer.k = dense_rows(k.data(), DType::bf16, layers_.spec.kv_heads, dim);
      layer.v = dense_rows(v.data(), DType::bf16, layers_.spec.kv_heads, dim);
    }
    backend_->forward(layer);
    return to_host<uint16_t>(out, index(tokens * heads() * layers_.out_dim()));
  }

 private:
  const Layers& layers_;
  ContextShards shards_;
  ThreadPool threads_;
  std::unique_ptr<KvPool> pool_;
  std::unique_ptr<Replayed> replayed_;
  std::unique_ptr<AttentionBackend> backend_;
  int64_t first_head_ = 0;
  std::vector<int32_t> table_;
};

Layers gqa(int32_t ranks) {
  AttentionSpec spec;
  spec.q_heads = 2 * ranks;
  spec.kv_heads = 2;
  spec.head_dim = spec.head_dim_v = 128;
  spec.q_dtype = DType::bf16;
  spec.needs_lse = true;
  return {"portable", spec};
}

Layers mla(int32_t ranks) {
  AttentionSpec spec;
  spec.kind = AttentionKind::mla;
  spec.q_heads = 8 * ranks;
  spec.kv_heads = 1;
  spec.mla = {.kv_lora_rank = 512, .rope_dim = 64};
  spec.scores.softmax_scale = 0.05f;
  spec.q_dtype = DType::bf16;
  spec.needs_lse = true;
  return {"portable_mla", spec};
}

void expect_one_ranks_result(const Layers& layers, const ContextShards& shards,
                             const std::vector<Pass>& passes, bool has_sinks) {
  Layers whole_layers = layers;
  whole_layers.spec.scores.has_sinks = has_sinks;
  std::vector<float> sinks;
  for (int32_t head = 0; has_sinks && head < layers.spec.q_heads; ++head) {
    sinks.push_back(static_cast<float>(head % 3) - 1);
  }
  Rank whole(whole_layers, shards, 0, nullptr);
  Sent sent;
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int rank = 0; rank < shards.ranks; ++rank) {
    ranks.push_back(std::make_unique<Rank>(layers, shards, rank, &sent));
  }
  for (size_t p = 0; p < passes.size(); ++p) {
    const auto seed = static_cast<uint32_t>(10 * p + 1);
    const std::vector<uint16_t> expected = whole.run(passes[p], seed, sinks);
    sent.clear();
    std::vector<std::vector<uint16_t>> got(ranks.size());
    // The queries of all ranks are known after the first round, their states after the second.
    for (int round = 0; round < 3; ++round) {
      for (size_t rank = 0; rank < ranks.size(); ++rank) {
        got[rank] = ranks[rank]->run(passes[p], seed, sinks);
      }
    }
    const int64_t dim = layers.out_dim();
    for (int64_t token = 0; token < passes[p].tokens(); ++token) {
      for (int64_t i = 0; i < layers.spec.q_heads * dim; ++i) {
        const int64_t width = ranks[0]->heads() * dim;
        const float want = bf16_to_float(expected[index(token * layers.spec.q_heads * dim + i)]);
        const float has = bf16_to_float(got[index(i / width)][index(token * width + i % width)]);
        ASSERT_NEAR(has, want, 0.01f + std::fabs(want) / 64)
            << "pass " << p << ", token " << token << ", value " << i << ", " << shards.ranks
            << " ranks, interleave " << shards.interleave;
      }
    }
  }
}

// Prompts, one of them after cached tokens, a batch of prompts and decodes, decodes, idle requests.
std::vector<Pass> all_kinds() {
  return {{ForwardMode::extend, {19, 1, 0}, {19, 1, 0}},
          {ForwardMode::mixed, {1, 12, 5}, {20, 13, 5}, true},
          {ForwardMode::decode, {1, 1, 1}, {21, 14, 6}, true},
          {ForwardMode::target_verify, {3, 3, 3}, {24, 17, 9}},
          {ForwardMode::decode, {1, 0, 1}, {25, 0, 10}}};
}

class GpuContextBackend : public testing::Test {
 protected:
  void SetUp() override {
    if (gpu_devices().empty()) GTEST_SKIP() << why_no_gpu();
  }
};

TEST_F(GpuContextBackend, GivesOneRanksResult) {
  for (const int32_t ranks : {2, 3}) {
    expect_one_ranks_result(gqa(ranks), {ranks, 1}, all_kinds(), false);
  }
}

TEST_F(GpuContextBackend, GivesOneRanksResultWithSinks) {
  expect_one_ranks_result(gqa(2), {2, 1}, all_kinds(), true);
}

TEST_F(GpuContextBackend, GivesOneRanksResultForAnyInterleave) {
  const std::vector<Pass> passes = all_kinds();
  expect_one_ranks_result(gqa(2), {2, 2}, passes, false);
  expect_one_ranks_result(gqa(2), {2, kPageSize}, {passes[0], passes[1]}, false);
}

TEST_F(GpuContextBackend, LatentsGiveOneRanksResult) {
  expect_one_ranks_result(mla(2), {2, 1}, all_kinds(), false);
}

}  // namespace
}  // namespace fovea
