// SPDX-License-Identifier: Apache-2.0
// Speculation: a pass verifies a tree of draft tokens, the model's choices accept one of its paths,
// and a commit moves the keys and values of that path to consecutive places. Rejected drafts end by
// shortening the request.
//
//   node 0 -- 1 -- 3       node 0 is the request's last token; the others are drafts
//       \---- 2 -- 4       accepted: 0, 2, 4
#include <algorithm>
#include <cmath>
#include <iostream>
#include <vector>

#include "fovea/select_backend.h"
#include "fovea/speculation.h"

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
    KvPool* const pools[] = {pool_.get()};
    speculation_ = make_speculation({.max_requests = 1, .width = 8}, pools, {}, &threads_);
    row_ = *requests_.allocate();
  }

  // Adds tokens and returns out [tokens, heads, head_dim].
  std::vector<float> run(const std::vector<int32_t>& tokens) {
    const auto count = static_cast<int32_t>(tokens.size());
    const std::vector<int64_t> slots = extend(count);
    length_ += count;

    const std::vector<int32_t> q_indptr{0, count};
    BatchView batch{.mode = ForwardMode::extend, .requests = 1, .tokens = count};
    batch.q_indptr = q_indptr;
    batch.kv_lens = {&length_, 1};
    batch.request_rows = {&row_, 1};
    batch.table = requests_.table();
    batch.out_slots = slots;
    return attend(batch, tokens);
  }

  // Verifies drafts and commits those that the model chose. Returns the new tokens.
  std::vector<int32_t> speculate(const std::vector<int32_t>& tokens,
                                 const std::vector<int32_t>& parents) {
    const auto width = static_cast<int32_t>(tokens.size());
    extend(width);
    const Drafts drafts{1, width, tokens, parents, {&length_, 1}};
    const DraftPlaces places{requests_.table(), {&row_, 1}};

    std::vector<uint64_t> ancestors(tokens.size());
    std::vector<int64_t> out_slots(tokens.size());
    std::vector<int32_t> q_indptr(2), kv_lens(1);
    const DraftArrays arrays{
        .ancestors = ancestors, .out_slots = out_slots, .q_indptr = q_indptr, .kv_lens = kv_lens};
    speculation_->describe(drafts, places, arrays);
    const std::vector<float> out = attend(draft_batch(drafts, places, arrays), tokens);

    const std::vector<int32_t> chosen = choose(out, width);
    std::vector<int32_t> counts(1), nodes(tokens.size()), text(tokens.size());
    const AcceptedDrafts accepted{.counts = counts, .nodes = nodes, .tokens = text};
    speculation_->accept(drafts, TargetTokens{chosen}, accepted);
    speculation_->commit(drafts, arrays, accepted, {});

    // Pages without a token are free again.
    const int32_t verified = length_ + width;
    length_ += counts[0];
    pages_.truncate(requests_.row(row_).first(static_cast<size_t>(verified)), length_);
    text.resize(static_cast<size_t>(counts[0]));
    return text;
  }

  int32_t length() const { return length_; }

 private:
  // Takes slots for `count` tokens after the request's.
  std::vector<int64_t> extend(int32_t count) {
    const std::span<int32_t> row = requests_.row(row_);
    std::vector<int64_t> slots;
    pages_.extend(length_, length_ + count, length_ > 0 ? row[length_ - 1] : -1, slots);
    std::copy(slots.begin(), slots.end(), row.begin() + length_);
    return slots;
  }

  std::vector<float> attend(const BatchView& batch, const std::vector<int32_t>& tokens) {
    backend_->plan(batch);
    std::vector<float> q = embed(tokens, 3), k = embed(tokens, 5), v = embed(tokens, 7);
    std::vector<float> out(q.size());
    backend_->forward({.q = dense_rows(q.data(), DType::f32, kHeads, kHeadDim),
                       .k = dense_rows(k.data(), DType::f32, kHeads, kHeadDim),
                       .v = dense_rows(v.data(), DType::f32, kHeads, kHeadDim),
                       .out = dense_rows(out.data(), DType::f32, kHeads, kHeadDim)});
    return out;
  }

  // A model would choose a token after each node from `out`; here the choices are given.
  static std::vector<int32_t> choose(const std::vector<float>& out, int32_t width) {
    std::vector<int32_t> chosen(out.size() / kRow, 0);
    const std::vector<int32_t> next = {22, 23, 24, 0, 30};
    std::copy_n(next.begin(), std::min<size_t>(next.size(), static_cast<size_t>(width)),
                chosen.begin());
    return chosen;
  }

  ThreadPool threads_;
  std::unique_ptr<KvPool> pool_ = make_kv_pool(kCache, kPages);
  RequestTable requests_{/*max_requests=*/2, kLimits.max_kv_len};
  PageAllocator pages_{kPages, kCache.page_size};
  std::unique_ptr<AttentionBackend> backend_;
  std::unique_ptr<Speculation> speculation_;
  int32_t row_ = 0, length_ = 0;
};

}  // namespace

int main() {
  Request request;
  request.run({11, 12, 13, 14, 15});  // the prompt, causal
  const int32_t before = request.length();

  // Node 0 is the request's last token. The parents of 1 and 2 are 0, of 3 is 1, of 4 is 2.
  const std::vector<int32_t> drafts{20, 21, 22, 23, 24};
  const std::vector<int32_t> text = request.speculate(drafts, {-1, 0, 0, 1, 2});

  // Another request gets the same tokens one by one. What follows must be equal.
  Request plain;
  plain.run({11, 12, 13, 14, 15});
  for (const int32_t token : {20, 22, 24}) plain.run({token});
  const std::vector<float> found = request.run({text.back()}), want = plain.run({text.back()});

  float largest = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    largest = std::max(largest, std::fabs(found[i] - want[i]));
  }
  std::cout << "new tokens:";
  for (const int32_t token : text) std::cout << " " << token;
  std::cout << "; the next pass differs by " << largest << " from one without drafts\n";
  const bool as_told = text == std::vector<int32_t>{22, 24, 30} && request.length() == before + 4 &&
                       request.length() == plain.length();
  return largest < 1e-5f && as_told ? 0 : 1;
}
