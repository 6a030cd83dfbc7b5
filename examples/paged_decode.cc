// SPDX-License-Identifier: Apache-2.0
// Decode on the CPU with pages: two requests share a pool. Each reads a prompt, then decodes token
// by token; a request table and a page allocator keep the slots. Reading a whole text at once gives
// the same bits as decoding it.
#include <algorithm>
#include <iostream>
#include <vector>

#include "fovea/select_backend.h"

namespace {

using namespace fovea;

constexpr int32_t kQHeads = 8, kKvHeads = 2, kHeadDim = 64;
const KvCacheSpec kCache{.layers = 1,
                         .kv_heads = kKvHeads,
                         .head_dim = kHeadDim,
                         .head_dim_v = kHeadDim,
                         .page_size = 16};
const AttentionSpec kSpec{
    .q_heads = kQHeads, .kv_heads = kKvHeads, .head_dim = kHeadDim, .head_dim_v = kHeadDim};
const BatchLimits kLimits{.max_requests = 2, .max_tokens = 64, .max_q_len = 32, .max_kv_len = 64};

// The values a model would compute for one token: they depend on the request and the position.
std::vector<float> token_values(int32_t heads, int32_t request, int32_t position) {
  std::vector<float> values(static_cast<size_t>(heads * kHeadDim));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>((i * 7 + request * 13 + position * 29) % 31) / 31 - 0.5f;
  }
  return values;
}

// One layer of a small engine: a pool, the slots of two requests, and a backend.
class Layer {
 public:
  Layer() {
    const BackendRegistry registry = BackendRegistry::builtin();
    const Selection choice = select_backend(registry, {kSpec, kCache, kLimits, cpu_device()});
    backend_ = choice.chosen->create({.spec = kSpec, .kv = pool_.get(), .threads = &threads_});
    backend_->reserve(kLimits);
    for (int32_t& row : rows_) row = *requests_.allocate();
  }

  // Gives request i new_tokens[i] tokens and returns out [tokens, q_heads, head_dim].
  std::vector<float> step(ForwardMode mode, const std::vector<int32_t>& new_tokens) {
    std::vector<int32_t> q_indptr{0};
    std::vector<int64_t> out_slots;
    std::vector<float> q, k, v;
    const auto append = [](std::vector<float>& to, const std::vector<float>& values) {
      to.insert(to.end(), values.begin(), values.end());
    };
    for (int32_t i = 0; i < 2; ++i) {
      const std::span<int32_t> row = requests_.row(rows_[i]);
      int32_t& length = lengths_[i];
      const int64_t last_slot = length > 0 ? row[length - 1] : -1;
      if (!pages_.extend(length, length + new_tokens[i], last_slot, out_slots)) return {};
      for (int32_t t = 0; t < new_tokens[i]; ++t, ++length) {
        row[length] = static_cast<int32_t>(out_slots[q.size() / (kQHeads * kHeadDim)]);
        append(q, token_values(kQHeads, i, length));
        append(k, token_values(kKvHeads, i, length + 1));
        append(v, token_values(kKvHeads, i, length + 2));
      }
      q_indptr.push_back(q_indptr.back() + new_tokens[i]);
    }
    BatchView batch{.mode = mode, .requests = 2, .tokens = q_indptr.back()};
    batch.q_indptr = q_indptr;
    batch.kv_lens = lengths_;
    batch.request_rows = rows_;
    batch.table = requests_.table();
    batch.out_slots = out_slots;
    backend_->plan(batch);

    std::vector<float> out(q.size());
    backend_->forward({.q = dense_rows(q.data(), DType::f32, kQHeads, kHeadDim),
                       .k = dense_rows(k.data(), DType::f32, kKvHeads, kHeadDim),
                       .v = dense_rows(v.data(), DType::f32, kKvHeads, kHeadDim),
                       .out = dense_rows(out.data(), DType::f32, kQHeads, kHeadDim)});
    return out;
  }

 private:
  ThreadPool threads_;
  std::unique_ptr<KvPool> pool_ = make_kv_pool(kCache, /*pages=*/8);
  RequestTable requests_{/*max_requests=*/3, /*max_context=*/64};
  PageAllocator pages_{/*pages=*/8, kCache.page_size};
  std::unique_ptr<AttentionBackend> backend_;
  std::vector<int32_t> rows_{0, 0}, lengths_{0, 0};
};

}  // namespace

int main() {
  Layer decoding;
  decoding.step(ForwardMode::extend, {20, 9});
  std::vector<float> last;
  for (int i = 0; i < 3; ++i) last = decoding.step(ForwardMode::decode, {1, 1});

  Layer reading;
  const std::vector<float> whole = reading.step(ForwardMode::extend, {23, 12});
  const size_t row = kQHeads * kHeadDim;
  const bool equal = std::equal(last.begin(), last.begin() + row, whole.begin() + 22 * row) &&
                     std::equal(last.begin() + row, last.end(), whole.begin() + 34 * row);
  std::cout << "decoded and read tokens have " << (equal ? "equal" : "different") << " bits\n";
  return equal ? 0 : 1;
}
