// SPDX-License-Identifier: Apache-2.0
// Speculation: a pass verifies a tree of draft tokens, and the accepted path is committed. Rejected
// drafts end by shortening the request; a path that is not the first in its tree runs once more, so
// that its keys stand at consecutive positions.
//
//   new token 0 -- 1 -- 3       token 0 was sampled before; 1, 2 and 3 are drafts
//            \---- 2 -- 4       accepted: 0, 2, 4
#include <algorithm>
#include <cmath>
#include <iostream>
#include <vector>

#include "fovea/select_backend.h"

namespace {

using namespace fovea;

constexpr int32_t kHeads = 4, kHeadDim = 32, kRow = kHeads * kHeadDim, kPages = 32;
const KvCacheSpec kCache{
    .layers = 1, .kv_heads = kHeads, .head_dim = kHeadDim, .head_dim_v = kHeadDim, .page_size = 4};
const AttentionSpec kSpec{.mask = MaskKind::tree,
                          .q_heads = kHeads,
                          .kv_heads = kHeads,
                          .head_dim = kHeadDim,
                          .head_dim_v = kHeadDim};
const BatchLimits kLimits{.max_tokens = 32, .max_q_len = 32, .max_kv_len = 64};

// The values a model would compute for a token of the vocabulary.
std::vector<float> embed(const std::vector<int32_t>& tokens, int32_t seed) {
  std::vector<float> values;
  for (const int32_t token : tokens) {
    for (int32_t i = 0; i < kRow; ++i) {
      values.push_back(std::sin(static_cast<float>(token * 37 + i * seed)));
    }
  }
  return values;
}

class Request {
 public:
  Request() {
    const BackendRegistry registry = BackendRegistry::builtin();
    const Selection choice = select_backend(registry, {kSpec, kCache, kLimits, cpu_device()});
    backend_ = choice.chosen->create({.spec = kSpec, .kv = pool_.get(), .threads = &threads_});
    backend_->reserve(kLimits);
    row_ = *requests_.allocate();
  }

  // Adds tokens and returns out [tokens, heads, head_dim]. Without a tree they are a chain.
  std::vector<float> run(const std::vector<int32_t>& tokens,
                         const std::vector<uint64_t>& tree = {}) {
    const auto count = static_cast<int32_t>(tokens.size());
    const std::span<int32_t> row = requests_.row(row_);
    std::vector<int64_t> slots;
    pages_.extend(length_, length_ + count, length_ > 0 ? row[length_ - 1] : -1, slots);
    std::copy(slots.begin(), slots.end(), row.begin() + length_);
    length_ += count;

    const std::vector<int32_t> q_indptr{0, count};
    BatchView batch{.mode = tree.empty() ? ForwardMode::extend : ForwardMode::target_verify,
                    .requests = 1,
                    .tokens = count};
    batch.q_indptr = q_indptr;
    batch.kv_lens = {&length_, 1};
    batch.request_rows = {&row_, 1};
    batch.table = requests_.table();
    batch.out_slots = slots;
    batch.masks.tree.ancestors = tree;
    backend_->plan(batch);

    std::vector<float> q = embed(tokens, 3), k = embed(tokens, 5), v = embed(tokens, 7);
    std::vector<float> out(q.size());
    backend_->forward({.q = dense_rows(q.data(), DType::f32, kHeads, kHeadDim),
                       .k = dense_rows(k.data(), DType::f32, kHeads, kHeadDim),
                       .v = dense_rows(v.data(), DType::f32, kHeads, kHeadDim),
                       .out = dense_rows(out.data(), DType::f32, kHeads, kHeadDim)});
    return out;
  }

  // Keeps the first `length` tokens. Pages without a token are free again.
  void shorten(int32_t length) {
    pages_.truncate(requests_.row(row_).first(static_cast<size_t>(length_)), length);
    length_ = length;
  }
  int32_t length() const { return length_; }

 private:
  ThreadPool threads_;
  std::unique_ptr<KvPool> pool_ = make_kv_pool(kCache, kPages);
  RequestTable requests_{/*max_requests=*/2, kLimits.max_kv_len};
  PageAllocator pages_{kPages, kCache.page_size};
  std::unique_ptr<AttentionBackend> backend_;
  int32_t row_ = 0, length_ = 0;
};

}  // namespace

int main() {
  Request request;
  request.run({11, 12, 13, 14, 15});  // the prompt, causal
  const int32_t before = request.length();

  // Bit j of a token lets it see new token j: itself and its ancestors.
  const std::vector<int32_t> drafts{20, 21, 22, 23, 24};
  const std::vector<float> verified =
      request.run(drafts, {0b00001, 0b00011, 0b00101, 0b01011, 0b10101});

  // Commit 0, 2, 4: forget all drafts, then run the path. A path 0, 1, ... n - 1 would only need
  // request.shorten(before + n).
  request.shorten(before);
  const std::vector<float> committed = request.run({20, 22, 24});

  float largest = 0;
  for (size_t i = 0; i < committed.size(); ++i) {
    const size_t token = 2 * (i / kRow);  // 0, 2, 4
    largest = std::max(largest, std::fabs(verified[token * kRow + i % kRow] - committed[i]));
  }
  std::cout << "the accepted path differs by " << largest << " from its verification; length "
            << request.length() << "\n";
  return largest < 1e-5f && request.length() == before + 3 ? 0 : 1;
}
