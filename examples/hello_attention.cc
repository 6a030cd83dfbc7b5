// SPDX-License-Identifier: Apache-2.0
// One decode step of one request through a paged cache.
#include <iostream>
#include <vector>

#include "fovea/kv_cache.h"
#include "fovea/select_backend.h"

int main() {
  using namespace fovea;
  const KvCacheSpec cache{
      .layers = 1, .kv_heads = 2, .head_dim = 64, .head_dim_v = 64, .page_size = 16};
  const AttentionSpec spec{.q_heads = 8, .kv_heads = 2, .head_dim = 64, .head_dim_v = 64};
  const BatchLimits limits{.max_requests = 4, .max_tokens = 4, .max_kv_len = 1024};

  ThreadPool threads;
  DeviceInfo device = cpu_device();
  device.cores = threads.size();
  const BackendRegistry registry = BackendRegistry::builtin();
  const Selection selection = select_backend(registry, {spec, cache, limits, device});
  std::cout << selection.explain();

  auto pool = make_kv_pool(cache, /*pages=*/64);
  auto backend = selection.chosen->create({spec, pool.get(), nullptr, &threads});
  backend->reserve(limits);

  // A request of 20 tokens: the table lists the slot of each; the last one is new.
  RequestTable table(/*max_requests=*/4, /*max_context=*/1024);
  PageAllocator pages(pool->pages(), cache.page_size);
  const int32_t row = *table.allocate();
  std::vector<int64_t> slots;
  if (!pages.extend(/*prefix=*/0, /*length=*/20, /*last_slot=*/-1, slots)) return 1;
  std::copy(slots.begin(), slots.end(), table.row(row).begin());

  const int32_t q_indptr[] = {0, 1}, kv_lens[] = {20};
  backend->plan({.mode = ForwardMode::decode,
                 .requests = 1,
                 .tokens = 1,
                 .max_q_len = 1,
                 .max_kv_len = 20,
                 .q_indptr = q_indptr,
                 .kv_lens = kv_lens,
                 .request_rows = &row,
                 .request_slots = table.data(),
                 .request_slots_stride = table.row_stride(),
                 .out_slots = &slots.back()});

  std::vector<float> q(8 * 64, 1.0f), k(2 * 64, 1.0f), v(2 * 64, 1.0f), out(8 * 64);
  backend->forward({.q = dense_rows(q.data(), DType::f32, 8, 64),
                    .k = dense_rows(k.data(), DType::f32, 2, 64),
                    .v = dense_rows(v.data(), DType::f32, 2, 64),
                    .out = dense_rows(out.data(), DType::f32, 8, 64)});
  // 19 zero keys score 0, the new key scores 8: e^8 / (e^8 + 19).
  std::cout << "out[0] = " << out[0] << "\n";
  return out[0] > 0.9936f && out[0] < 0.9937f ? 0 : 1;
}
