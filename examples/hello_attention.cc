// SPDX-License-Identifier: Apache-2.0
// Runs one decode step for one request of 20 tokens over a paged cache.
#include <iostream>
#include <vector>

#include "fovea/select_backend.h"

int main() {
  using namespace fovea;
  const KvCacheSpec cache{
      .layers = 1, .kv_heads = 2, .head_dim = 64, .head_dim_v = 64, .page_size = 16};
  const AttentionSpec spec{.q_heads = 8, .kv_heads = 2, .head_dim = 64, .head_dim_v = 64};
  const BatchLimits limits{.max_kv_len = 32};
  const BackendRegistry registry = BackendRegistry::builtin();
  const Selection selection = select_backend(registry, {spec, cache, limits, cpu_device()});
  std::cout << selection.explain();

  ThreadPool threads;
  const auto pool = make_kv_pool(cache, /*pages=*/64);
  const auto backend =
      selection.chosen->create({.spec = spec, .kv = pool.get(), .threads = &threads});
  backend->reserve(limits);

  // The tokens lie in pages 5 and 9. The last one is new.
  const int32_t q_indptr[] = {0, 1}, kv_lens[] = {20}, rows[] = {0}, page_table[] = {5, 9};
  const int64_t out_slots[] = {9 * 16 + 3};
  backend->plan({.mode = ForwardMode::decode,
                 .requests = 1,
                 .tokens = 1,
                 .q_indptr = q_indptr,
                 .kv_lens = kv_lens,
                 .request_rows = rows,
                 .table = {.entries = page_table, .stride = 2, .entry_tokens = 16, .rows = 1},
                 .out_slots = out_slots});

  std::vector<float> q(8 * 64, 1), k(2 * 64, 1), v(2 * 64, 1), out(8 * 64);
  backend->forward({.q = dense_rows(q.data(), DType::f32, 8, 64),
                    .k = dense_rows(k.data(), DType::f32, 2, 64),
                    .v = dense_rows(v.data(), DType::f32, 2, 64),
                    .out = dense_rows(out.data(), DType::f32, 8, 64)});
  // 19 zero keys score 0, the new key scores 8: e^8 / (e^8 + 19).
  std::cout << "out[0] = " << out[0] << "\n";
  return out[0] > 0.9936f && out[0] < 0.9937f ? 0 : 1;
}
