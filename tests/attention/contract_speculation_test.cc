// SPDX-License-Identifier: Apache-2.0
// A tree of drafts must give the results of its root-to-leaf paths as plain causal requests, and a
// committed path must leave the cache that such a request would have.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "fovea/speculation.h"
#include "support/cases.h"
#include "support/expect_close.h"
#include "support/run_backend.h"
#include "support/served_case.h"

namespace fovea {
namespace {

using test::AttentionCase;
using test::CaseData;
using test::Output;
using test::RequestData;
using test::ServedCase;

std::vector<ServedCase> trees() {
  std::vector<AttentionCase> cases = test::attention_cases();
  std::erase_if(cases, [](const auto& test) { return test.spec.mask != MaskKind::tree; });
  return test::served_cases(cases);
}

// The path that ends in `leaf`, root first.
std::vector<int32_t> path_to(const RequestData& request, int32_t leaf) {
  std::vector<int32_t> path;
  for (int32_t node = leaf; node >= 0; node = request.parents[node]) path.push_back(node);
  std::reverse(path.begin(), path.end());
  return path;
}

// rows[i] of a tensor of `count` rows.
std::vector<float> gather(const std::vector<float>& tensor, int32_t count,
                          const std::vector<int32_t>& rows) {
  const size_t size = tensor.size() / static_cast<size_t>(count);
  std::vector<float> gathered;
  for (int32_t row : rows) {
    const auto begin = tensor.begin() + static_cast<int64_t>(row * size);
    gathered.insert(gathered.end(), begin, begin + static_cast<int64_t>(size));
  }
  return gathered;
}

// The cached tokens followed by one path, causal.
RequestData path_request(const RequestData& tree, const std::vector<int32_t>& path) {
  std::vector<int32_t> keys;
  for (int32_t key = 0; key < tree.cached(); ++key) keys.push_back(key);
  for (int32_t node : path) keys.push_back(tree.cached() + node);
  RequestData request;
  request.q_len = static_cast<int32_t>(path.size());
  request.kv_len = static_cast<int32_t>(keys.size());
  request.q = gather(tree.q, tree.q_len, path);
  request.q_succ = gather(tree.q_succ, tree.q_len, path);
  request.q_inter = gather(tree.q_inter, tree.q_len, path);
  request.k = gather(tree.k, tree.kv_len, keys);
  if (!tree.v.empty()) request.v = gather(tree.v, tree.kv_len, keys);
  return request;
}

void append(const test::OracleResult& path, test::OracleResult& all) {
  const auto add = [](const test::Expected& from, test::Expected& to) {
    to.out.insert(to.out.end(), from.out.begin(), from.out.end());
    to.lse.insert(to.lse.end(), from.lse.begin(), from.lse.end());
  };
  add(path.exact, all.exact);
  add(path.plain, all.plain);
  all.rounded_keys = path.rounded_keys;
}

class Speculation : public ::testing::TestWithParam<ServedCase> {};

TEST_P(Speculation, TreeEqualsItsPaths) {
  const AttentionCase& test = GetParam().test;
  const CaseData data = make_data(test);
  const Output output = run_case(GetParam().entry, test, data);
  AttentionCase causal = test;
  causal.spec.mask = MaskKind::none;
  const auto tokens = static_cast<int32_t>(output.lse.size() / test.spec.q_heads);
  if (tokens == 0) GTEST_SKIP() << "no new tokens";
  int32_t first_row = 0;
  for (const RequestData& tree : data.requests) {
    // All paths are compared together, because the budget uses the worst row of the request.
    test::OracleResult want;
    std::vector<int32_t> rows;
    for (int32_t leaf = 0; leaf < tree.q_len; ++leaf) {
      const bool inner = std::count(tree.parents.begin(), tree.parents.end(), leaf) > 0;
      if (inner) continue;
      const std::vector<int32_t> path = path_to(tree, leaf);
      CaseData alone = data;
      alone.requests = {path_request(tree, path)};
      append(oracle(causal, alone, 0), want);
      for (int32_t node : path) rows.push_back(first_row + node);
    }
    EXPECT_TRUE(is_close(causal.spec, want, gather(output.out, tokens, rows),
                         gather(output.lse, tokens, rows)))
        << "tree from row " << first_row;
    first_row += tree.q_len;
  }
}

// The backend that verifies drafts also serves the prompt: without a mask its rows are causal, and
// there may be more of them than a mask has bits.
TEST_P(Speculation, WithoutATreeRowsAreCausal) {
  AttentionCase test = GetParam().test;
  test.mode = ForwardMode::mixed;
  test.requests = {{70, 70}, {1, 90}, {5, 40}, {0, 12}, {1, 1}};
  test.shared_prefix = test.group_prefix = test.group_size = test.prefix_levels = 0;
  AttentionCase causal = test;
  causal.spec.mask = MaskKind::none;
  const CaseData data = make_data(causal);
  const Output output = run_case(GetParam().entry, test, data, {.fill = test::Fill::poison});
  const auto tokens = static_cast<int32_t>(output.lse.size() / test.spec.q_heads);
  int32_t row = 0;
  for (size_t request = 0; request < test.requests.size(); ++request) {
    std::vector<int32_t> rows(static_cast<size_t>(test.requests[request].q_len));
    std::iota(rows.begin(), rows.end(), row);
    row += test.requests[request].q_len;
    EXPECT_TRUE(is_close(causal.spec, oracle(causal, data, request),
                         gather(output.out, tokens, rows), gather(output.lse, tokens, rows)))
        << "request " << request;
  }
}

// The bytes of a token in a layer.
std::vector<char> row_of(const KvPool& pool, int64_t slot) {
  const KvLayerView view = pool.layer(test::PagedStore::kLayer);
  const KvCacheSpec& spec = pool.spec();
  if (!pool.slot_map().empty()) slot = pool.slot_map()[static_cast<size_t>(slot)];
  std::vector<char> bytes;
  const auto add = [&](const void* from, size_t count) {
    const char* const begin = static_cast<const char*>(from);
    bytes.insert(bytes.end(), begin, begin + count);
  };
  for (int32_t head = 0; head < spec.kv_heads; ++head) {
    const size_t width = view.layout == KvLayout::mla_fp8_rows ? 656 : spec.head_dim;
    add(k_address(view, slot, head), width * dtype_bytes(view.dtype));
    if (view.layout == KvLayout::mha) {
      add(v_address(view, slot, head), spec.head_dim_v * dtype_bytes(view.dtype));
    }
    if (view.scale != KvScale::per_token_head) continue;
    add(view.k_scale + slot * spec.kv_heads + head, sizeof(float));
    add(view.v_scale + slot * spec.kv_heads + head, sizeof(float));
  }
  return bytes;
}

// Commits a path of every request in the store, on the CPU.
void commit_paths(test::PagedStore& store, const CaseData& data,
                  const std::vector<std::vector<int32_t>>& paths) {
  int32_t width = 1;
  for (const RequestData& request : data.requests) width = std::max(width, request.q_len);
  const auto requests = static_cast<int32_t>(paths.size());
  std::vector<int32_t> counts, lens(paths.size());
  std::vector<int32_t> nodes(paths.size() * static_cast<size_t>(width), -1);
  std::vector<int64_t> slots(nodes.size(), -1);
  for (size_t i = 0; i < paths.size(); ++i) {
    counts.push_back(static_cast<int32_t>(paths[i].size()));
    const size_t first = i * static_cast<size_t>(width);
    std::copy(paths[i].begin(), paths[i].end(), nodes.begin() + static_cast<int64_t>(first));
    for (int32_t node = 0; node < data.requests[i].q_len; ++node) {
      slots[first + static_cast<size_t>(node)] = store.slot(i, data.requests[i].cached() + node);
    }
  }
  ThreadPool threads(2);
  KvPool* const pools[] = {&store.pool()};
  const auto speculation = make_speculation({requests, width}, pools, {}, &threads);
  speculation->commit({.requests = requests, .width = width, .lens = lens}, {.out_slots = slots},
                      {.counts = counts, .nodes = nodes}, {});
}

TEST_P(Speculation, CommittedPathsLeaveTheCacheOfTheirOwnRun) {
  const AttentionCase& test = GetParam().test;
  if (test.skip_some_writes) GTEST_SKIP() << "some drafts are not stored by the pass";
  const CaseData data = make_data(test);
  ThreadPool threads(2);
  test::PagedStore store(test, data, test::Fill::poison);
  test::BackendUnderTest under_test(GetParam().entry, test, &store, threads);
  test::PackedBatch batch(test, data, &store, test::whole_case(test), test::Fill::poison);
  under_test.run(batch);
  std::vector<std::vector<int32_t>> paths;
  for (const RequestData& tree : data.requests) {
    paths.push_back(tree.q_len == 0 ? std::vector<int32_t>() : path_to(tree, tree.q_len - 1));
  }
  commit_paths(store, data, paths);
  for (size_t i = 0; i < paths.size(); ++i) {
    SCOPED_TRACE("request " + std::to_string(i));
    if (paths[i].empty()) continue;
    AttentionCase causal = test;
    causal.spec.mask = MaskKind::none;
    causal.shared_prefix = causal.group_prefix = causal.group_size = causal.prefix_levels = 0;
    CaseData alone = data;
    alone.requests = {path_request(data.requests[i], paths[i])};
    causal.requests = {{alone.requests[0].q_len, alone.requests[0].kv_len}};
    const test::PagedStore want(causal, alone, test::Fill::zero, test::Written::all);
    const int32_t cached = data.requests[i].cached();
    for (int32_t step = 0; step < causal.requests[0].q_len; ++step) {
      EXPECT_EQ(row_of(store.pool(), store.slot(i, cached + step)),
                row_of(want.pool(), want.slot(0, cached + step)))
          << "token " << step << " of the path";
    }
  }
}

// Arrays of a batch may be longer than it needs.
template <typename T>
std::vector<T> first_of(std::span<const T> values, size_t count) {
  return {values.begin(), values.begin() + static_cast<int64_t>(count)};
}

// The batches of these tests are made from the definitions of a mask; describe() must derive them
// from the parents alone.
TEST_P(Speculation, DescriptionsAreTheBatchesThatBackendsVerify) {
  const AttentionCase& test = GetParam().test;
  const CaseData data = make_data(test);
  const int32_t width = data.requests[0].q_len;
  std::vector<int32_t> parents, lens, rows;
  test::PagedStore store(test, data, test::Fill::poison);
  for (size_t i = 0; i < data.requests.size(); ++i) {
    const RequestData& tree = data.requests[i];
    if (tree.q_len != width || width == 0) GTEST_SKIP() << "the requests' widths differ";
    parents.insert(parents.end(), tree.parents.begin(), tree.parents.end());
    lens.push_back(tree.cached());
    rows.push_back(store.row(i));
  }
  test::PackedBatch batch(test, data, &store, test::whole_case(test), test::Fill::poison);
  const BatchView want = batch.view();
  if (want.requests != static_cast<int32_t>(lens.size())) GTEST_SKIP() << "the batch is padded";
  std::vector<uint64_t> ancestors(parents.size());
  std::vector<int32_t> positions(parents.size()), q_indptr(lens.size() + 1), kv_lens(lens.size());
  std::vector<int64_t> out_slots(parents.size());
  const DraftArrays arrays{.ancestors = ancestors,
                           .positions = positions,
                           .out_slots = out_slots,
                           .q_indptr = q_indptr,
                           .kv_lens = kv_lens};
  const Drafts drafts{.requests = want.requests, .width = width, .parents = parents, .lens = lens};
  const DraftPlaces places{want.table, rows};
  ThreadPool threads(1);
  make_speculation({want.requests, width}, {}, {}, &threads)->describe(drafts, places, arrays);
  const BatchView got = draft_batch(drafts, places, arrays);
  EXPECT_EQ(got.mode, want.mode);
  EXPECT_EQ(got.tokens, want.tokens);
  EXPECT_EQ(ancestors, first_of(want.masks.tree.ancestors, ancestors.size()));
  EXPECT_EQ(q_indptr, first_of(want.q_indptr, q_indptr.size()));
  EXPECT_EQ(kv_lens, first_of(want.kv_lens, kv_lens.size()));
  EXPECT_EQ(rows, first_of(want.request_rows, rows.size()));
  if (!want.positions.empty()) {
    EXPECT_EQ(positions, first_of(want.positions, positions.size()));
  }
  for (size_t node = 0; node < parents.size(); ++node) {
    if (want.out_slots[node] < 0) continue;  // the case has stored the token itself
    EXPECT_EQ(out_slots[node], want.out_slots[node]) << node;
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Speculation);
INSTANTIATE_TEST_SUITE_P(Builtin, Speculation, ::testing::ValuesIn(trees()),
                         test::served_case_name);

}  // namespace
}  // namespace fovea
