// SPDX-License-Identifier: Apache-2.0
// A tree of drafts must give the results of its root-to-leaf paths as plain causal requests.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

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

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Speculation);
INSTANTIATE_TEST_SUITE_P(Builtin, Speculation, ::testing::ValuesIn(trees()),
                         test::served_case_name);

}  // namespace
}  // namespace fovea
