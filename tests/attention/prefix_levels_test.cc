// SPDX-License-Identifier: Apache-2.0
#include "attention/prefix_levels.h"

#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "fovea/select_backend.h"

namespace fovea {
namespace {

using Array = std::vector<int32_t>;

constexpr int32_t kDocument = 12000, kSystem = 3000, kMinSaved = 8192;

// A system prompt that all requests but the last share, two documents, and limits of groups.
struct Tree {
  Array q_indptr = {0, 1, 2, 4, 5, 6, 46, 47, 48};
  Array kv_lens = {15000, 12200, 12100, 13000, 14000, 15000, 16000, 600};
  Array shared = {9999, kDocument, kSystem, kDocument, kDocument, kSystem, kSystem, 10};
  BatchView view() const {
    BatchView batch;
    batch.requests = static_cast<int32_t>(kv_lens.size());
    batch.tokens = q_indptr.back();
    batch.q_indptr = q_indptr;
    batch.kv_lens = kv_lens;
    batch.hints.shared_prefix = shared;
    return batch;
  }
};

struct Found {
  explicit Found(const Tree& tree, int32_t levels, int32_t max_q_len = 8,
                 int32_t min_saved = kMinSaved)
      : first_keys(tree.kv_lens.size(), 77) {  // values of the previous pass
    std::vector<PrefixLevel> given;
    for (int32_t i = 0; i < levels; ++i) {
      arrays[i] = {Array(tree.q_indptr.size(), 77), Array(tree.kv_lens.size(), 77),
                   Array(tree.kv_lens.size(), 77)};
      given.push_back({arrays[i][0].data(), arrays[i][1].data(), arrays[i][2].data()});
    }
    used = find_prefix_levels(tree.view(), {max_q_len, min_saved}, given, first_keys.data());
  }
  int32_t used = 0;
  std::array<std::array<Array, 3>, kMaxPrefixLevels> arrays;
  Array first_keys;
};

TEST(PrefixLevels, AreTheTreeOfPrefixesFromItsRoot) {
  const Found found(Tree{}, kMaxPrefixLevels);
  EXPECT_EQ(found.used, 2);
  // Request 5 has 40 new tokens: it joins no group and separates request 6 from the others.
  EXPECT_EQ(found.arrays[0][0], (Array{0, 6, 6, 6, 6, 6, 46, 47, 48}));
  EXPECT_EQ(found.arrays[0][1], (Array{kSystem, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(found.arrays[0][2], (Array{0, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(found.arrays[1][0], (Array{0, 2, 2, 6, 6, 6, 46, 47, 48}));
  EXPECT_EQ(found.arrays[1][1], (Array{kDocument, 0, kDocument, 0, 0, 0, 0, 0}));
  EXPECT_EQ(found.arrays[1][2], (Array{kSystem, kSystem, kSystem, kSystem, kSystem, 0, 0, 0}));
  EXPECT_EQ(found.first_keys,
            (Array{kDocument, kDocument, kDocument, kDocument, kDocument, 0, 0, 0}));
}

TEST(PrefixLevels, StopAtTheLevelsThereAre) {
  const Found found(Tree{}, 1);
  EXPECT_EQ(found.used, 1);
  EXPECT_EQ(found.first_keys, (Array{kSystem, kSystem, kSystem, kSystem, kSystem, 0, 0, 0}));
}

TEST(PrefixLevels, NewTokensAndShortPrefixesAreNotShared) {
  Tree tree;
  tree.shared = {0, 12200, 12100, 0, 0, 0, 0, 0};  // with the new tokens of requests 1 and 2
  EXPECT_EQ(Found(tree, 2).first_keys, (Array{12098, 12098, 12098, 0, 0, 0, 0, 0}));
  tree.shared = Array(8, kMinPrefix - 1);
  const Found found(tree, 2);
  EXPECT_EQ(found.used, 0);
  EXPECT_EQ(found.first_keys, Array(8, 0));
  EXPECT_EQ(Found(Tree{}, 2, 0).used, 0) << "no request is short enough";
}

TEST(PrefixLevels, GroupsAreOfRequestsThatHaveThePrefixAndFewNewTokens) {
  Tree tree;
  tree.shared = {0, 0, 0, 0, 13500, 0, 0, 0};
  EXPECT_EQ(Found(tree, 1).first_keys, (Array{0, 0, 0, 12999, 12999, 0, 0, 0})) << "request 3 ends";
  tree.shared = {0, 0, kMinPrefix, 0, 0, 0, 0, 0};  // request 2 has two new tokens
  EXPECT_EQ(Found(tree, 1, 2, 1).used, 1);
  EXPECT_EQ(Found(tree, 1, 1, 1).used, 0);
  --tree.shared[2];
  EXPECT_EQ(Found(tree, 1, 2, 1).used, 0);
  tree.shared = {0, kDocument, 0, 0, 0, 0, 0, 0};
  tree.q_indptr[1] = 0;
  EXPECT_EQ(Found(tree, 1, 2).used, 0) << "request 0 has no new token";
  EXPECT_EQ(Found({}, 1, 0, 0).used, 0) << "a level without groups";
}

TEST(PrefixLevels, ALevelSavesWhatTheOneAboveDidNot) {
  Tree tree;
  tree.shared = {0, kSystem + kMinSaved, kSystem, kSystem, kSystem, 0, 0, 0};
  EXPECT_EQ(Found(tree, 2).used, 2);
  --tree.shared[1];
  EXPECT_EQ(Found(tree, 2).used, 1);
}

TEST(PrefixLevels, AreOfLayersWhoseTokensSeeAllBefore) {
  const AttentionSpec good{.q_heads = 4, .kv_heads = 2, .head_dim = 64, .head_dim_v = 64};
  const BatchLimits limits{.prefix_levels = 2};
  using Change = void (*)(AttentionSpec&);
  for (const Change change : std::vector<Change>{
           [](auto& s) { s.kind = AttentionKind::mla; },
           [](auto& s) { s.scope = AttentionScope::cross; },
           [](auto& s) { s.mask = MaskKind::custom; },
           [](auto& s) { s.mask = MaskKind::prefix_spans; },
           [](auto& s) { s.window = 1 << 20; },
           [](auto& s) { s.chunk = 1 << 20; },
           [](auto& s) { s.scores.has_alibi = true; },
           [](auto& s) { s.batch_invariant = true; },
       }) {
    AttentionSpec spec = good;
    change(spec);
    EXPECT_FALSE(shares_prefixes(spec));
    EXPECT_EQ(describe_prefix_levels(spec, limits), "");
  }
  AttentionSpec tree = good;
  tree.mask = MaskKind::tree;
  EXPECT_TRUE(shares_prefixes(good));
  EXPECT_TRUE(shares_prefixes(tree));
  EXPECT_NE(describe_prefix_levels(good, limits).find("in up to 2 levels"), std::string::npos);
  EXPECT_EQ(describe_prefix_levels(good, {}), "");
}

TEST(PrefixLevels, SavingsAreBytesOfTheCache) {
  KvCacheSpec cache{.dtype = DType::bf16, .kv_heads = 8, .head_dim = 128, .head_dim_v = 128};
  BatchLimits limits;
  for (const auto& [bytes, keys] :
       {std::pair{0, 0}, {1, 1}, {4096, 1}, {4097, 2}, {1 << 30, 1 << 18}}) {
    limits.min_prefix_savings = bytes;
    EXPECT_EQ(min_saved_keys(cache, limits), keys) << bytes;
  }
  cache.dtype = DType::f8e4m3;
  EXPECT_EQ(min_saved_keys(cache, limits), 1 << 19);
  limits.min_prefix_savings = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(min_saved_keys(cache, limits), std::numeric_limits<int32_t>::max());
}

TEST(PrefixLevels, BoundsSayWhatALevelSavesAtMost) {
  const BatchLimits limits{.max_requests = 8, .max_kv_len = 1 << 20};
  BatchView batch;
  EXPECT_EQ(max_saved_keys(batch, limits), 0) << "no request";
  batch.requests = 1;
  EXPECT_EQ(max_saved_keys(batch, limits), 0) << "nobody to share with";
  batch.requests = 8;
  EXPECT_EQ(max_saved_keys(batch, limits), 7 << 20);
  batch.hints.max_kv_len = 5000;
  EXPECT_EQ(max_saved_keys(batch, limits), 7 * 5000);
  batch.requests = 1 << 20;
  batch.hints.max_kv_len = 0;
  EXPECT_EQ(max_saved_keys(batch, limits), int64_t{(1 << 20) - 1} << 20) << "no overflow";
}

// Groups take no more memory if batches may be longer: their states depend on max_requests.
TEST(PrefixLevels, WorkspaceIsBoundedByRequests) {
  const BackendRegistry registry = BackendRegistry::builtin();
  BackendRequest request;
  request.spec = {.q_heads = 32, .kv_heads = 8, .head_dim = 128, .head_dim_v = 128};
  request.cache = {.layers = 1, .kv_heads = 8, .head_dim = 128, .head_dim_v = 128};
  request.limits = {.max_requests = 4, .max_q_len = 8, .max_kv_len = 4096};
  request.device = cpu_device();
  for (const char* name : {"cpu", "reference"}) {
    const BackendEntry& entry = *registry.find(name);
    const auto bytes_of_levels = [&](int32_t max_tokens) {
      BackendRequest with = request;
      with.limits.max_tokens = max_tokens;
      const size_t without = entry.workspace_bytes(with);
      with.limits.prefix_levels = 2;
      return entry.workspace_bytes(with) - without;
    };
    // Four requests of eight tokens are 32 rows each.
    EXPECT_GT(bytes_of_levels(32), bytes_of_levels(31)) << name;
    EXPECT_EQ(bytes_of_levels(33), bytes_of_levels(32)) << name;
    EXPECT_EQ(bytes_of_levels(1 << 20), bytes_of_levels(32)) << name;
  }
}

TEST(PrefixLevels, TokensOfAPassWithGroups) {
  AttentionSpec spec{.q_heads = 32, .kv_heads = 8};
  BatchLimits limits{.max_requests = 4, .max_tokens = 1000};
  EXPECT_EQ(max_prefix_tokens(spec, limits), 32);
  limits.max_tokens = 20;
  EXPECT_EQ(max_prefix_tokens(spec, limits), 20);
  limits.max_requests = limits.max_tokens = std::numeric_limits<int32_t>::max();
  EXPECT_EQ(max_prefix_tokens(spec, limits), limits.max_tokens) << "no overflow";
  spec.kv_heads = 1;
  EXPECT_TRUE(shares_prefixes(spec));
  EXPECT_EQ(max_prefix_q_len(spec), 1);
  spec.q_heads = 33;
  EXPECT_FALSE(shares_prefixes(spec)) << "a token has too many rows for any group";
}

TEST(PrefixLevels, ALevelMustSaveEnough) {
  Tree tree;
  tree.shared = {0, kMinSaved - 1, 0, 0, 0, 0, 0, 0};
  EXPECT_EQ(Found(tree, 2).used, 0);
  tree.shared[1] = kMinSaved;
  EXPECT_EQ(Found(tree, 2).used, 1);
}

TEST(PrefixLevels, EveryGroupMustSaveMore) {
  Tree tree;
  const int32_t each = (kMinSaved + extra_saved(kMinSaved)) / 2;
  tree.shared = {0, each - 1, 0, each, 0, 0, 0, 0};
  EXPECT_EQ(Found(tree, 2).used, 0);
  ++tree.shared[1];
  EXPECT_EQ(Found(tree, 2).used, 1);
}

}  // namespace
}  // namespace fovea
