// SPDX-License-Identifier: Apache-2.0
// The fixture of tests of what is refused.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "attention/backends/backends.h"
#include "support/expect_error.h"

namespace fovea::test {

constexpr int32_t kPage = 4, kPages = 12, kContext = 32;

// Two requests of 9 and 6 tokens, 2 and 3 of them new, and everything a batch may point to.
struct TwoRequests {
  AttentionSpec spec{.q_heads = 2, .kv_heads = 1, .head_dim = 8, .head_dim_v = 8};
  KvCacheSpec cache{.layers = 1, .kv_heads = 1, .head_dim = 8, .head_dim_v = 8, .page_size = kPage};
  BatchLimits limits{
      .max_requests = 2, .max_tokens = 5, .max_q_len = 3, .max_kv_len = 16, .max_encoder_len = 8};
  std::vector<int32_t> q_indptr = {0, 2, 5}, kv_lens = {9, 6}, rows = {1, 2};
  std::vector<int32_t> slots = std::vector<int32_t>(3 * kContext, 0);
  std::vector<int32_t> pages = slots;  // the same tokens as `slots`, by pages
  std::vector<int64_t> out_slots;
  std::vector<int32_t> positions = {7, 8, 3, 4, 5};
  std::vector<uint64_t> tree = {1, 3, 1, 3, 7};
  std::vector<uint8_t> custom = std::vector<uint8_t>(2 * 9 + 3 * 6, 1);
  std::vector<int64_t> custom_indptr = {0, 18, 36};
  std::vector<int32_t> spans = {0, 3}, span_indptr = {0, 1, 1};
  std::vector<uint32_t> prefix_lens = {4, 2};
  std::vector<uint16_t> in_items = std::vector<uint16_t>(2 * 5, 0);
  std::vector<int32_t> encoder_lens = {8, 0};
  std::vector<int32_t> host_q_lens, host_kv_lens;
  BatchView batch;
  ThreadPool threads{1};
  std::unique_ptr<KvPool> pool;
  std::unique_ptr<AttentionBackend> backend;

  TwoRequests() {
    for (int32_t token = 0; token < 16; ++token) {
      slots[kContext + token] = (1 + token / kPage) * kPage + token % kPage;
      slots[2 * kContext + token] = (5 + token / kPage) * kPage + token % kPage;
      pages[kContext + token / kPage] = 1 + token / kPage;
      pages[2 * kContext + token / kPage] = 5 + token / kPage;
    }
    for (const int32_t token : {7, 8}) out_slots.push_back(slots[kContext + token]);
    for (const int32_t token : {3, 4, 5}) out_slots.push_back(slots[2 * kContext + token]);
    batch = {.mode = ForwardMode::extend,
             .requests = 2,
             .tokens = 5,
             .q_indptr = q_indptr,
             .kv_lens = kv_lens,
             .request_rows = rows,
             .table = {.entries = slots.data(), .stride = kContext, .rows = 3},
             .out_slots = out_slots,
             .positions = positions,
             .masks = {.tree = {tree},
                       .custom = {custom, custom_indptr},
                       .spans = {spans, span_indptr},
                       .items = {prefix_lens, in_items, 5}},
             .hints = {.max_q_len = 3, .max_kv_len = 9}};
    batch.cross = {.lens = encoder_lens, .table = batch.table};
  }

  void tell(int32_t q_len, int32_t second_q_len, int32_t kv_len, int32_t second_kv_len) {
    host_q_lens = {q_len, second_q_len};
    host_kv_lens = {kv_len, second_kv_len};
    batch.hints.host_q_lens = host_q_lens;
    batch.hints.host_kv_lens = host_kv_lens;
  }

  void give_pages() {
    batch.table.entries = pages.data();
    batch.table.entry_tokens = kPage;
  }

  void create() {
    if (!is_packed(spec.scope)) pool = make_kv_pool(cache, kPages);
    backend = reference_backend().create({spec, pool.get(), nullptr, &threads});
    backend->reserve(limits);
  }
};

}  // namespace fovea::test
