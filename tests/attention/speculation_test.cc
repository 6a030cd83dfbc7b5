// SPDX-License-Identifier: Apache-2.0
// Speculation on the CPU, and with FOVEA_TEST_DEVICE=cuda on a GPU: descriptions, acceptance by
// tokens and commits against plain definitions, for random trees.
#include "fovea/speculation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "support/draft_trees.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using test::DraftTree;
using test::Shared;
using test::SpeculationFixture;

class Drafting : public SpeculationFixture {};

// Table rows by slots and by pages; entry t of row r is r * 100 + t.
TEST_F(Drafting, DescriptionsAreThoseOfTheDefinitions) {
  std::mt19937 random(4);
  for (const int32_t width : {1, 2, 7, 33, kMaxDraftNodes}) {
    for (const int32_t entry_tokens : {1, 3}) {
      constexpr int32_t kRequests = 5, kRows = 9, kStride = 100;
      const auto spec = make({.max_requests = kRequests, .width = width}, {});
      DraftTree trees(kRequests, width, random);
      trees.lens = {0, 31, -1, 5, 17};
      std::vector<int32_t> table(kRows * kStride);
      for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
      Shared<int32_t> entries(table), rows({1, 8, 3, 0, 5});
      Shared<uint64_t> ancestors(trees.nodes());
      Shared<int32_t> positions(trees.nodes()), child(trees.nodes()), sibling(trees.nodes());
      Shared<int32_t> indptr(kRequests + 1), kv_lens(kRequests);
      Shared<int64_t> slots(trees.nodes());
      const DraftPlaces places{{entries.data(), kStride, entry_tokens, kRows}, rows.view()};
      const DraftArrays arrays{ancestors.view(), positions.view(), child.view(),  sibling.view(),
                               slots.view(),     indptr.view(),    kv_lens.view()};
      spec->describe(trees.view(), places, arrays);
      for (int32_t request = 0; request < kRequests; ++request) {
        const int32_t length = trees.lens[request];
        EXPECT_EQ(kv_lens.read()[request], length < 0 ? 0 : length + width);
        EXPECT_EQ(indptr.read()[request + 1], (request + 1) * width);
        for (int32_t node = 0; node < width; ++node) {
          const size_t at = static_cast<size_t>(request * width + node);
          SCOPED_TRACE("node " + std::to_string(node) + " of " + std::to_string(request));
          const std::vector<int32_t> path = trees.path(request, node);
          uint64_t bits = 0;
          for (const int32_t step : path) bits |= uint64_t{1} << step;
          EXPECT_EQ(ancestors.read()[at], bits);
          EXPECT_EQ(positions.read()[at],
                    length < 0 ? 0 : length + static_cast<int32_t>(path.size()) - 1);
          const std::vector<int32_t> children = trees.children(request, node);
          EXPECT_EQ(child.read()[at], children.empty() ? -1 : children[0]);
          const int32_t parent = trees.parents[at];
          const std::vector<int32_t> family =
              parent < 0 ? std::vector<int32_t>{node} : trees.children(request, parent);
          const auto next = std::upper_bound(family.begin(), family.end(), node);
          EXPECT_EQ(sibling.read()[at], next == family.end() ? -1 : *next);
          const int32_t token = length + node, row = rows.read()[request];
          const int64_t slot =
              int64_t{row * kStride + token / entry_tokens} * entry_tokens + token % entry_tokens;
          EXPECT_EQ(slots.read()[at], length < 0 ? -1 : slot);
        }
      }
      EXPECT_EQ(indptr.read()[0], 0);
    }
  }
}

TEST_F(Drafting, ChainsNeedNoParents) {
  const auto spec = make({.max_requests = 2, .width = 4}, {});
  Shared<int32_t> lens({7, 0}), child(8), positions(8);
  Shared<uint64_t> ancestors(8);
  const Drafts drafts{.requests = 2, .width = 4, .lens = lens.view()};
  const DraftArrays arrays{
      .ancestors = ancestors.view(), .positions = positions.view(), .first_child = child.view()};
  spec->describe(drafts, {}, arrays);
  EXPECT_EQ(ancestors.read(), (std::vector<uint64_t>{1, 3, 7, 15, 1, 3, 7, 15}));
  EXPECT_EQ(positions.read(), (std::vector<int32_t>{7, 8, 9, 10, 0, 1, 2, 3}));
  EXPECT_EQ(child.read(), (std::vector<int32_t>{1, 2, 3, -1, 1, 2, 3, -1}));
  const BatchView batch = draft_batch(drafts, {}, arrays);
  EXPECT_EQ(batch.mode, ForwardMode::target_verify);
  EXPECT_TRUE(batch.positions.empty());
  EXPECT_EQ(batch.tokens, 8);
}

// Follows the first child that has the model's token.
std::vector<int32_t> accepted_path(const DraftTree& trees, int32_t request,
                                   const std::vector<int32_t>& target) {
  std::vector<int32_t> path = {0};
  for (bool grows = true; grows;) {
    grows = false;
    const int32_t wanted = target[trees.at(request, path.back())];
    for (const int32_t child : trees.children(request, path.back())) {
      if (grows || trees.tokens[trees.at(request, child)] != wanted) continue;
      path.push_back(child);
      grows = true;
    }
  }
  return path;
}

TEST_F(Drafting, AcceptsThePathOfTheModelsTokens) {
  std::mt19937 random(5);
  int32_t longest = 0;
  for (const int32_t width : {1, 2, 9, 40, kMaxDraftNodes}) {
    constexpr int32_t kRequests = 60;
    const auto spec = make({.max_requests = kRequests, .width = width}, {});
    DraftTree trees(kRequests, width, random);
    std::vector<int32_t> wanted(trees.nodes());
    // Few tokens, so that paths are long and siblings are equal.
    for (int32_t& token : trees.tokens) token = static_cast<int32_t>(random() % 2);
    for (int32_t& token : wanted) token = static_cast<int32_t>(random() % 2);
    trees.lens[1] = -1;
    Shared<int32_t> target(wanted), counts(kRequests), nodes(trees.nodes()), tokens(trees.nodes()),
        bonus(kRequests);
    spec->accept(trees.view(), TargetTokens{target.view()},
                 {counts.view(), nodes.view(), tokens.view(), bonus.view()});
    for (int32_t request = 0; request < kRequests; ++request) {
      SCOPED_TRACE(std::to_string(request));
      std::vector<int32_t> path = accepted_path(trees, request, wanted);
      std::vector<int32_t> text;
      for (size_t i = 1; i < path.size(); ++i) {
        text.push_back(trees.tokens[trees.at(request, path[i])]);
      }
      text.push_back(wanted[trees.at(request, path.back())]);
      if (request == 1) path.clear(), text.clear();
      longest = std::max(longest, static_cast<int32_t>(path.size()));
      EXPECT_EQ(counts.read()[request], static_cast<int32_t>(path.size()));
      EXPECT_EQ(bonus.read()[request], text.empty() ? -1 : text.back());
      path.resize(width, -1);
      text.resize(width, -1);
      const auto row_of = [&](const Shared<int32_t>& array) {
        const auto begin = array.read().begin() + int64_t{request} * width;
        return std::vector<int32_t>(begin, begin + width);
      };
      EXPECT_EQ(row_of(nodes), path);
      EXPECT_EQ(row_of(tokens), text);
    }
  }
  EXPECT_GE(longest, 5);  // otherwise the test says little
}

struct PoolCase {
  const char* name;
  KvCacheSpec spec;
  bool window = false;
};

std::vector<PoolCase> pool_cases() {
  const KvCacheSpec mha{.dtype = DType::bf16,
                        .layers = 3,
                        .kv_heads = 2,
                        .head_dim = 40,
                        .head_dim_v = 24,
                        .page_size = 4};
  std::vector<PoolCase> cases = {{"nhd", mha},         {"page_1", mha},       {"hnd", mha},
                                 {"scales", mha},      {"window", mha, true}, {"latents", mha},
                                 {"fp8_latents", mha}, {"fp8_rows", mha},     {"wide", mha}};
  cases[1].spec.page_size = 1;
  cases[2].spec.order = KvOrder::hnd;
  cases[3].spec.dtype = DType::f8e4m3;
  cases[3].spec.scale = KvScale::per_token_head;
  cases[3].spec.kv_heads = 3;  // 12 bytes of scales
  cases[4].spec.window = 16;
  for (size_t i : {5, 6, 7}) {
    KvCacheSpec& spec = cases[i].spec;
    spec.layout = KvLayout::mla;
    spec.kv_heads = 1;
    spec.head_dim = 576;
    spec.head_dim_v = 512;
    if (i > 5) spec.dtype = DType::f8e4m3;
  }
  cases[6].spec.scale = KvScale::per_token_head;
  cases[7].spec.layout = KvLayout::mla_fp8_rows;
  cases[8].spec.kv_heads = 8;  // rows of several pieces
  cases[8].spec.head_dim = cases[8].spec.head_dim_v = 128;
  return cases;
}

// A commit changes the rows of moved tokens, as a plain copy of each of them would, and no other
// byte of any pool.
TEST_F(Drafting, CommitsMoveTheRowsOfAcceptedNodes) {
  std::mt19937 random(6);
  constexpr int32_t kRequests = 6, kWidth = 11;
  for (const PoolCase& test : pool_cases()) {
    SCOPED_TRACE(test.name);
    test::FilledPool first(test.spec, test.window, device(), random);
    test::FilledPool second(pool_cases()[0].spec, false, device(), random);
    const auto spec =
        make({.max_requests = kRequests, .width = kWidth}, {&first.pool(), &second.pool()});
    DraftTree trees(kRequests, kWidth, random);
    trees.lens = {0, 13, -1, 7, 30, 2};
    Shared<int64_t> slots(first.random_slots(trees.nodes(), random));
    std::vector<int32_t> counts(kRequests), nodes(trees.nodes(), -1);
    for (int32_t request = 0; request < kRequests; ++request) {
      if (trees.lens[request] < 0) continue;
      const auto path = trees.path(request, static_cast<int32_t>(random() % kWidth));
      counts[request] = static_cast<int32_t>(path.size());
      std::copy(path.begin(), path.end(), nodes.begin() + request * kWidth);
    }
    counts[5] = kWidth;  // all nodes in their places
    for (int32_t node = 0; node < kWidth; ++node) nodes[trees.at(5, node)] = node;
    for (test::FilledPool* pool : {&first, &second}) {
      for (int32_t request = 0; request < kRequests; ++request) {
        for (int32_t i = 0; i < counts[request]; ++i) {
          pool->expect_move(slots.read()[trees.at(request, nodes[trees.at(request, i)])],
                            slots.read()[trees.at(request, i)]);
        }
      }
    }
    Shared<int32_t> shared_counts(counts), shared_nodes(nodes), kv_lens(kRequests), lens(kRequests);
    std::vector<int32_t> batch_lens(kRequests, 0), committed = trees.lens;
    for (int32_t request = 0; request < kRequests; ++request) {
      if (trees.lens[request] < 0) continue;
      batch_lens[request] = trees.lens[request] + kWidth;
      committed[request] += counts[request];
    }
    kv_lens.write(batch_lens);
    lens.write(trees.lens);
    spec->commit(trees.view(), {.out_slots = slots.view(), .kv_lens = kv_lens.view()},
                 {.counts = shared_counts.view(), .nodes = shared_nodes.view()},
                 {.lens = lens.view()});
    EXPECT_EQ(lens.read(), committed);
    EXPECT_TRUE(first.as_expected());
    EXPECT_TRUE(second.as_expected());
  }
}

TEST_F(Drafting, CommitsSelectTheStateOfTheLastAcceptedNode) {
  const auto spec = make({.max_requests = 3, .width = 4}, {});
  Shared<int32_t> lens({5, -1, 9}), counts({3, 0, 1}),
      nodes({0, 2, 3, -1, -1, -1, -1, -1, 0, -1, -1, -1});
  Shared<int64_t> slots(std::vector<int64_t>(12, -1));
  Shared<int32_t> states({1, 2, 3}), snapshots({10, 11, 12, 13, 20, 21, 22, 23, -1, 31, 32, 33});
  const Drafts drafts{.requests = 3, .width = 4, .lens = lens.view()};
  spec->commit(drafts, {.out_slots = slots.view()},
               {.counts = counts.view(), .nodes = nodes.view()},
               {.state_slots = states.view(), .snapshot_slots = snapshots.view()});
  EXPECT_EQ(states.read(), (std::vector<int32_t>{13, 2, 3}));
  EXPECT_EQ(snapshots.read(),
            (std::vector<int32_t>{10, 11, 12, 1, 20, 21, 22, 23, -1, 31, 32, 33}));
}

// Describing, accepting and committing, captured once, take several steps whose lengths only the
// device knows, and give what calls on a CPU give.
TEST_F(Drafting, StepsReplayWithoutTheHost) {
  if (!test::on_gpu()) GTEST_SKIP() << "graphs are a GPU's";
  std::mt19937 random(8);
  constexpr int32_t kRequests = 3, kWidth = 7, kStride = 50, kSteps = 3;
  test::FilledPool pool(pool_cases()[0].spec, false, device(), random);
  DraftTree trees(kRequests, kWidth, random);
  std::vector<int32_t> wanted(trees.nodes());
  for (std::vector<int32_t>* tokens : {&trees.tokens, &wanted}) {
    for (int32_t& token : *tokens) token = static_cast<int32_t>(random() % 2);
  }
  trees.lens = {0, 10, -1};
  std::vector<int32_t> table(2 * kStride);
  std::iota(table.begin(), table.end(), 8);
  std::shuffle(table.begin(), table.end(), random);
  const std::vector<int32_t> request_rows = {1, 0, 0};

  ThreadPool threads(1);
  KvPool* const twins[] = {&pool.twin()};
  const auto host = make_speculation({kRequests, kWidth}, twins, {}, &threads);
  std::vector<int32_t> lens = trees.lens, kv(kRequests), counts(kRequests), nodes(trees.nodes());
  std::vector<int64_t> out_slots(trees.nodes());
  int32_t accepted = 0;
  for (int32_t step = 0; step < kSteps; ++step) {
    const Drafts drafts{kRequests, kWidth, trees.tokens, trees.parents, lens};
    const DraftArrays arrays{.out_slots = out_slots, .kv_lens = kv};
    host->describe(drafts, {{table.data(), kStride, 1, 2}, request_rows}, arrays);
    host->accept(drafts, TargetTokens{wanted}, {.counts = counts, .nodes = nodes});
    host->commit(drafts, arrays, {.counts = counts, .nodes = nodes}, {.lens = lens});
    accepted += counts[0] + counts[1];
  }
  ASSERT_GT(accepted, 2 * kSteps);

  const auto spec = make({.max_requests = kRequests, .width = kWidth}, {&pool.pool()});
  const Drafts drafts = trees.view();
  Shared<int32_t> entries(table), rows(request_rows), target(wanted), kv_lens(kRequests),
      found_counts(kRequests), found_nodes(trees.nodes());
  Shared<int64_t> slots(trees.nodes());
  const DraftArrays arrays{.out_slots = slots.view(), .kv_lens = kv_lens.view()};
  const AcceptedDrafts to{.counts = found_counts.view(), .nodes = found_nodes.view()};
  const DraftPlaces places{{entries.data(), kStride, 1, 2}, rows.view()};
  const TargetTokens chosen{target.view()};
  const CommittedArrays committed{.lens = trees.shared_lens.view()};
  gpu::synchronize(nullptr);
  const gpu::OwnedStream stream;
  const gpu::Graph graph = gpu::Graph::capture(stream.get(), [&](Stream capturing) {
    spec->describe(drafts, places, arrays, capturing);
    spec->accept(drafts, chosen, to, capturing);
    spec->commit(drafts, arrays, to, committed, capturing);
  });
  for (int32_t step = 0; step < kSteps; ++step) graph.launch(stream.get());
  gpu::synchronize(stream.get());
  EXPECT_EQ(trees.shared_lens.read(), lens);
  EXPECT_EQ(slots.read(), out_slots);
  EXPECT_EQ(found_nodes.read(), nodes);
  EXPECT_TRUE(pool.as_expected());
}

}  // namespace
}  // namespace fovea
