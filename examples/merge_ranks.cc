// SPDX-License-Identifier: Apache-2.0
// A context that is cut over two ranks: each attends to its own keys, and a StateMerger joins the
// results by their log-sum-exp. Both ranks run in this process; an engine would send q to all ranks
// and gather the states.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <random>
#include <vector>

#include "fovea/merge_states.h"
#include "fovea/select_backend.h"

namespace {

using namespace fovea;

constexpr int32_t kQHeads = 8, kKvHeads = 2, kHeadDim = 64, kTokens = 40, kCut = 25;
const KvCacheSpec kCache{.layers = 1,
                         .kv_heads = kKvHeads,
                         .head_dim = kHeadDim,
                         .head_dim_v = kHeadDim,
                         .page_size = 64};
const AttentionSpec kSpec{.q_heads = kQHeads,
                          .kv_heads = kKvHeads,
                          .head_dim = kHeadDim,
                          .head_dim_v = kHeadDim,
                          .needs_lse = true};
const BatchLimits kLimits{.max_tokens = 64, .max_q_len = 64, .max_kv_len = 64};

std::vector<float> noise(int32_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

struct State {
  std::vector<float> out = std::vector<float>(kQHeads * kHeadDim);
  std::vector<float> lse = std::vector<float>(kQHeads);

  AttentionState view() {
    return {.out = dense_rows(out.data(), DType::f32, kQHeads, kHeadDim),
            .lse = NaturalLse(lse.data())};
  }
};

// One rank with `tokens` keys in page 1 of its own pool.
class Rank {
 public:
  Rank(ThreadPool& threads, float* k, float* v, int32_t tokens) : tokens_(tokens) {
    const BackendRegistry registry = BackendRegistry::builtin();
    const Selection choice = select_backend(registry, {kSpec, kCache, kLimits, cpu_device()});
    backend_ = choice.chosen->create({.spec = kSpec, .kv = pool_.get(), .threads = &threads});
    backend_->reserve(kLimits);
    // Without q a layer only stores.
    plan(tokens);
    backend_->forward({.k = dense_rows(k, DType::f32, kKvHeads, kHeadDim),
                       .v = dense_rows(v, DType::f32, kKvHeads, kHeadDim)});
  }

  // Attention of one query to all keys of this rank. The query stands at the rank's last key, so
  // the causal mask hides none.
  State attend(std::vector<float>& q) {
    State state;
    plan(1);
    backend_->forward({.q = dense_rows(q.data(), DType::f32, kQHeads, kHeadDim),
                       .out = state.view().out,
                       .lse = state.view().lse,
                       .save_kv = false});
    return state;
  }

 private:
  void plan(int32_t new_tokens) {
    q_indptr_[1] = new_tokens;
    out_slots_.clear();
    for (int32_t t = tokens_ - new_tokens; t < tokens_; ++t) out_slots_.push_back(64 + t);
    BatchView batch{.mode = ForwardMode::extend, .requests = 1, .tokens = new_tokens};
    batch.q_indptr = q_indptr_;
    batch.kv_lens = {&tokens_, 1};
    batch.request_rows = {&row_, 1};
    batch.table = {.entries = &page_, .stride = 1, .entry_tokens = 64, .rows = 1};
    batch.out_slots = out_slots_;
    backend_->plan(batch);
  }

  // The arrays of a batch stay as they are until the last forward() of its pass.
  const int32_t row_ = 0, page_ = 1;
  int32_t q_indptr_[2] = {0, 0};
  std::vector<int64_t> out_slots_;
  std::unique_ptr<KvPool> pool_ = make_kv_pool(kCache, /*pages=*/2);
  std::unique_ptr<AttentionBackend> backend_;
  int32_t tokens_;
};

}  // namespace

int main() {
  ThreadPool threads;
  std::vector<float> k = noise(kTokens * kKvHeads * kHeadDim, 1);
  std::vector<float> v = noise(kTokens * kKvHeads * kHeadDim, 2);
  std::vector<float> q = noise(kQHeads * kHeadDim, 3);

  Rank all(threads, k.data(), v.data(), kTokens);
  Rank first(threads, k.data(), v.data(), kCut);
  const int64_t cut = int64_t{kCut} * kKvHeads * kHeadDim;
  Rank second(threads, k.data() + cut, v.data() + cut, kTokens - kCut);

  const State whole = all.attend(q);
  State merged = first.attend(q), part = second.attend(q);
  const auto merger = make_state_merger({.heads = kQHeads, .dim = kHeadDim}, {}, &threads);
  merger->merge(merged.view(), part.view(), /*tokens=*/1);

  float largest = 0;
  for (size_t i = 0; i < whole.out.size(); ++i) {
    largest = std::max(largest, std::fabs(whole.out[i] - merged.out[i]));
  }
  std::cout << "two ranks differ from one by " << largest << "\n";
  return largest < 1e-5f ? 0 : 1;
}
