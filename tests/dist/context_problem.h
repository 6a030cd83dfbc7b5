// SPDX-License-Identifier: Apache-2.0
// A layer whose context is distributed over ranks: its values, and the cache and batch of one rank.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "fovea/attention_backend.h"
#include "fovea/context_parallel.h"
#include "support/random_values.h"

namespace fovea::test {

inline constexpr int32_t kPageSize = 16;
inline constexpr int32_t kHeads = 2;  // q heads of one rank
inline constexpr int32_t kDim = 16, kLatent = 32, kRope = 16;

enum class Kind : uint8_t { gqa, mla };

struct Problem {
  Kind kind = Kind::gqa;
  ContextShards shards;
  std::vector<int32_t> q_lens, kv_lens;
  bool has_sinks = false;
  ContextMerge merge = ContextMerge::all_to_all;

  int32_t q_dim() const { return kind == Kind::mla ? kLatent + kRope : kDim; }
  int32_t row_dim() const { return q_dim(); }  // width of a cached key
  int32_t out_dim() const { return kind == Kind::mla ? kLatent : kDim; }
  int32_t all_heads() const { return kHeads * shards.ranks; }
  int32_t requests() const { return static_cast<int32_t>(kv_lens.size()); }
  int32_t tokens() const { return std::accumulate(q_lens.begin(), q_lens.end(), 0); }
  int32_t max_kv() const { return std::ranges::max(kv_lens); }

  AttentionSpec spec(int32_t heads) const {
    AttentionSpec spec;
    spec.q_heads = heads;
    spec.kv_heads = 1;
    spec.needs_lse = true;
    if (kind == Kind::mla) {
      spec.kind = AttentionKind::mla;
      spec.mla = {.kv_lora_rank = kLatent, .rope_dim = kRope};
      spec.scores.softmax_scale = 0.2f;
    } else {
      spec.head_dim = spec.head_dim_v = kDim;
    }
    return spec;
  }
  KvCacheSpec cache() const {
    return {.layout = kind == Kind::mla ? KvLayout::mla : KvLayout::mha,
            .layers = 1,
            .kv_heads = 1,
            .head_dim = row_dim(),
            .head_dim_v = out_dim(),
            .page_size = kPageSize};
  }
};

// The values of all tokens and queries, independent of the ranks that hold them.
struct Data {
  explicit Data(const Problem& problem) {
    const auto cached =
        static_cast<size_t>(std::accumulate(problem.kv_lens.begin(), problem.kv_lens.end(), 0));
    const auto tokens = static_cast<size_t>(problem.tokens());
    k = random_values(cached * static_cast<size_t>(problem.row_dim()), 1);
    v = random_values(cached * kDim, 2, -1, 1);
    if (problem.kind == Kind::mla) k = random_values(k.size(), 1, -1, 1);
    q = random_values(
        tokens * static_cast<size_t>(problem.all_heads()) * static_cast<size_t>(problem.q_dim()),
        3);
    sinks = random_values(static_cast<size_t>(problem.all_heads()), 4);
    int32_t first = 0;
    for (const int32_t length : problem.kv_lens) {
      begins.push_back(first);
      first += length;
    }
  }
  std::vector<float> k, v;  // [all tokens of all requests, dim]
  std::vector<float> q;     // [new tokens, all heads, q_dim]
  std::vector<float> sinks;
  std::vector<int32_t> begins;  // [requests] first token in k and v
};

struct State {
  State(int64_t tokens, int32_t heads, int32_t dim)
      : out(static_cast<size_t>(tokens * heads * dim), std::nanf("")),
        lse(static_cast<size_t>(tokens * heads), std::nanf("")),
        heads_(heads),
        dim_(dim) {}
  AttentionState view() {
    return {dense_rows(out.data(), DType::f32, heads_, dim_), NaturalLse(lse.data())};
  }
  std::vector<float> out, lse;

 private:
  int32_t heads_, dim_;
};

// One rank's pool, with the cached tokens that it owns, and the arrays of a batch over it.
class RankCache {
 public:
  RankCache(const Problem& problem, const Data& data, int32_t rank)
      : problem_(problem), data_(data), rank_(rank) {
    const int64_t wide = int64_t{kPageSize} * problem.shards.ranks;
    stride_ = problem.max_kv() / wide + 1;
    const int64_t pages = 1 + stride_ * problem.requests();
    pool_ = make_kv_pool(problem.cache(), pages);
    table_.resize(static_cast<size_t>(pages - 1));
    std::iota(table_.begin(), table_.end(), 1);
    std::shuffle(table_.begin(), table_.end(), std::mt19937(5));
    for (int32_t i = 0; i < problem.requests(); ++i) {
      const int32_t q_len = problem.q_lens[static_cast<size_t>(i)];
      const int32_t kv_len = problem.kv_lens[static_cast<size_t>(i)];
      for (int32_t n = 0; n < kv_len - q_len; ++n) write(i, n);
      for (int32_t n = kv_len - q_len; n < kv_len; ++n) {
        out_slots_.push_back(local_slot(i, n));
        row_of_token_.push_back(i);
        append(new_k_, data.k, i, n, problem.row_dim());
        append(new_v_, data.v, i, n, kDim);
      }
      q_indptr_.push_back(q_indptr_.back() + q_len);
    }
  }

  KvPool* pool() { return pool_.get(); }
  const std::vector<int32_t>& q_indptr() const { return q_indptr_; }

  // Every new token is a request of its own, which sees the rank's keys up to its position.
  BatchView rows_batch() {
    const auto tokens = static_cast<size_t>(problem_.tokens());
    visible_.resize(tokens);
    visible_lengths(problem_.shards, rank_, q_indptr_, problem_.kv_lens, visible_);
    count_.resize(tokens + 1);
    std::iota(count_.begin(), count_.end(), 0);
    BatchView batch;
    batch.mode = ForwardMode::decode;
    batch.requests = batch.tokens = problem_.tokens();
    batch.q_indptr = count_;
    batch.kv_lens = visible_;
    batch.request_rows = row_of_token_;
    batch.table = table();
    batch.out_slots = out_slots_;
    return batch;
  }
  // The requests themselves; `old` are their tokens on this rank before the new ones.
  BatchView context_batch() {
    old_.resize(problem_.kv_lens.size());
    visible_.clear();
    for (size_t i = 0; i < old_.size(); ++i) {
      old_[i] = static_cast<int32_t>(
          problem_.shards.local_length(problem_.kv_lens[i] - problem_.q_lens[i], rank_));
    }
    count_.resize(old_.size());
    std::iota(count_.begin(), count_.end(), 0);
    BatchView batch;
    batch.mode = ForwardMode::extend;
    batch.requests = problem_.requests();
    batch.tokens = problem_.tokens();
    batch.q_indptr = q_indptr_;
    batch.kv_lens = problem_.q_lens;
    batch.request_rows = count_;
    batch.cross = {.lens = old_, .table = table()};
    return batch;
  }

  // New keys and values, which every rank has.
  void set_new_keys(LayerTensors& layer) {
    if (problem_.kind == Kind::mla) {
      layer.mla.latent = dense_rows(new_k_.data(), DType::f32, 1, problem_.row_dim());
      layer.mla.k_rope = dense_rows(new_k_.data() + kLatent, DType::f32, 1, problem_.row_dim());
    } else {
      layer.k = dense_rows(new_k_.data(), DType::f32, 1, kDim);
      layer.v = dense_rows(new_v_.data(), DType::f32, 1, kDim);
    }
  }

 private:
  TokenTable table() const {
    return {.entries = table_.data(),
            .stride = stride_,
            .entry_tokens = kPageSize,
            .rows = problem_.requests()};
  }
  int64_t local_slot(int32_t request, int32_t position) const {
    const int64_t wide = int64_t{kPageSize} * problem_.shards.ranks;
    const int64_t page = table_[static_cast<size_t>(request * stride_ + position / wide)];
    return problem_.shards.local_slot(page * wide + position % wide, kPageSize, rank_);
  }
  const float* row(const std::vector<float>& values, int32_t request, int32_t position,
                   int32_t dim) const {
    return values.data() + (data_.begins[static_cast<size_t>(request)] + position) * dim;
  }
  void append(std::vector<float>& to, const std::vector<float>& from, int32_t request,
              int32_t position, int32_t dim) const {
    const float* const values = row(from, request, position, dim);
    to.insert(to.end(), values, values + dim);
  }
  void write(int32_t request, int32_t position) {
    const int64_t slot = local_slot(request, position);
    if (slot < 0) return;
    const KvLayerView view = pool_->layer(0);
    std::memcpy(k_address(view, slot, 0), row(data_.k, request, position, problem_.row_dim()),
                static_cast<size_t>(problem_.row_dim()) * sizeof(float));
    if (problem_.kind == Kind::mla) return;
    std::memcpy(v_address(view, slot, 0), row(data_.v, request, position, kDim),
                kDim * sizeof(float));
  }

  const Problem& problem_;
  const Data& data_;
  const int32_t rank_;
  std::unique_ptr<KvPool> pool_;
  int64_t stride_ = 0;  // wide pages of a request
  std::vector<int32_t> table_, q_indptr_ = {0}, row_of_token_, visible_, count_, old_;
  std::vector<int64_t> out_slots_;
  std::vector<float> new_k_, new_v_;
};

}  // namespace fovea::test
