// SPDX-License-Identifier: Apache-2.0
#include "engine/padded_passes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

namespace fovea {
namespace {

constexpr BatchLimits kLimits = {
    .max_requests = 40, .max_tokens = 512, .max_q_len = 300, .max_kv_len = 9000};
constexpr PaddedPassOptions kOptions = {.limits = kLimits,
                                        .max_requests = 36,
                                        .max_width = 5,
                                        .logit_rows = 180,
                                        .chunks = true,
                                        .draws = true};

// A pass of requests with these new tokens, and the rows of logits of each.
struct Pass {
  Pass(const std::vector<int32_t>& tokens, const std::vector<int32_t>& logit_rows) {
    size.requests = static_cast<int32_t>(tokens.size());
    for (size_t i = 0; i < tokens.size(); ++i) {
      PassPart part;
      part.tokens = std::span(text).first(static_cast<size_t>(tokens[i]));
      part.logit_rows = logit_rows[i];
      parts.push_back(part);
      size.tokens += tokens[i];
      size.logit_rows += logit_rows[i];
      size.max_q_len = std::max(size.max_q_len, tokens[i]);
    }
    size.draw_count = size.requests;
    size.max_kv_len = size.max_q_len;
  }
  explicit Pass(const std::vector<int32_t>& tokens)
      : Pass(tokens, std::vector<int32_t>(tokens.size(), 1)) {}

  std::vector<int32_t> text = std::vector<int32_t>(512);
  std::vector<PassPart> parts;
  PassSize size;
};

std::optional<PassSize> find(const PaddedPassOptions& options, const Pass& pass) {
  return PaddedPasses(options, SharedPrefixes({}, kLimits)).find(pass.parts, pass.size);
}

TEST(PaddedPasses, NoTwoSizesAreTheSame) {
  std::set<PaddedPasses::Key> keys;
  const std::vector<PassSize> sizes = PaddedPasses(kOptions, SharedPrefixes({}, kLimits)).sizes();
  for (const PassSize& size : sizes) keys.insert(PaddedPasses::key_of(size));
  EXPECT_EQ(keys.size(), sizes.size());
  EXPECT_EQ(std::ranges::count_if(sizes, PaddedPasses::has_chunks),
            static_cast<int64_t>(chunk_sizes(36, 512).size()));
}

TEST(PaddedPasses, GraphsAreCountedByKind) {
  EngineGraphs graphs;
  EXPECT_EQ(graphs.explain(), "");
  PassSize decode, drafts, shared;
  decode.max_q_len = shared.max_q_len = 1;
  drafts.max_q_len = 5;
  shared.shares_prefixes = true;
  const PassSize chunk = *find(kOptions, Pass({50, 1, 1}));
  for (const PassSize& size : {decode, drafts, drafts, shared, chunk, chunk, chunk}) {
    GraphCount& count = PaddedPasses::count_of(size, graphs);
    ++count.graphs;
    count.bytes += 1'500'000;
  }
  EXPECT_EQ(graphs.count(), 7);
  EXPECT_EQ(graphs.explain(),
            "graphs: 1 of decodes 1.5 MB, 1 of decodes with shared prefixes 1.5 MB, 2 of "
            "verifications of drafts 3.0 MB, 3 of chunks of prompts 4.5 MB\n");
}

TEST(PaddedPasses, APassGetsASizeThatHoldsItAndIsCaptured) {
  const std::vector<PassSize> sizes = PaddedPasses(kOptions, SharedPrefixes({}, kLimits)).sizes();
  std::mt19937 random(3);
  int padded = 0;
  for (int i = 0; i < 3000; ++i) {
    const size_t requests = 1 + random() % 40;
    const bool has_prompt = random() % 2 == 0;
    std::vector<int32_t> tokens, rows;
    for (size_t r = 0; r < requests; ++r) {
      const uint32_t longest = has_prompt && r == 0 ? 150 : random() % 3 == 0 ? 6 : 1;
      tokens.push_back(static_cast<int32_t>(1 + random() % longest));
      rows.push_back(has_prompt ? static_cast<int32_t>(random() % 2) : tokens.back());
    }
    const Pass pass(tokens, rows);
    const std::optional<PassSize> size = find(kOptions, pass);
    if (!size) continue;
    ++padded;
    EXPECT_TRUE(size->padded);
    EXPECT_GE(size->requests, pass.size.requests);
    EXPECT_GE(size->tokens, pass.size.tokens);
    EXPECT_GE(size->logit_rows, pass.size.logit_rows);
    EXPECT_GE(size->draw_count, pass.size.draw_count);
    EXPECT_GE(size->max_q_len, pass.size.max_q_len);
    EXPECT_TRUE(std::ranges::any_of(sizes, [&](const PassSize& other) {
      return PaddedPasses::key_of(other) == PaddedPasses::key_of(*size);
    }));
  }
  EXPECT_GT(padded, 500);
}

TEST(PaddedPasses, PassesWithSmallChunksArePaddedByTheirTokens) {
  const std::optional<PassSize> size = find(kOptions, Pass({50, 1, 1}));
  ASSERT_TRUE(size);
  EXPECT_EQ(size->requests, 8);
  EXPECT_EQ(size->tokens, 64);
  EXPECT_EQ(size->logit_rows, 8);
  EXPECT_EQ(size->mode, ForwardMode::mixed);
  EXPECT_EQ(find(kOptions, Pass({12, 1, 1, 1, 1, 1, 1, 1, 1}))->logit_rows, 32);
  EXPECT_FALSE(find(kOptions, Pass({128, 1})));
  EXPECT_FALSE(find(kOptions, Pass(std::vector<int32_t>(37, 2))));
}

TEST(PaddedPasses, BackendsAndPassesCanForbidChunks) {
  PaddedPassOptions options = kOptions;
  options.chunks = false;
  EXPECT_FALSE(find(options, Pass({50, 1, 1})));
  EXPECT_TRUE(find(options, Pass({1, 1})));
  EXPECT_TRUE(find(options, Pass({5, 1}, {5, 1})));     // drafts
  EXPECT_FALSE(find(kOptions, Pass({9, 50}, {9, 1})));  // drafts beyond the width, and a prompt
  Pass shared({50, 1, 1});
  shared.size.shares_prefixes = true;
  EXPECT_FALSE(find(kOptions, shared));
}

}  // namespace
}  // namespace fovea
