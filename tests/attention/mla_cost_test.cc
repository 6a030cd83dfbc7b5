// SPDX-License-Identifier: Apache-2.0
// The choice between the two forms of MLA, and its bounds for batches.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "attention/mla_forms.h"
#include "support/deepseek_spec.h"

namespace fovea {
namespace {

TEST(MlaCost, DependsOnLengthsAlone) {
  const AttentionSpec deepseek = test::deepseek_spec();
  EXPECT_EQ(choose_mla_form(deepseek, 1, 4096), MlaForm::absorbed);
  EXPECT_EQ(choose_mla_form(deepseek, 8, 8), MlaForm::absorbed);
  EXPECT_EQ(choose_mla_form(deepseek, 512, 512), MlaForm::up_projected);
  EXPECT_EQ(choose_mla_form(deepseek, 512, 8192), MlaForm::up_projected);
  EXPECT_EQ(choose_mla_form(deepseek, 16, 65536), MlaForm::absorbed);
  AttentionSpec few = deepseek;
  few.q_heads = 2;
  EXPECT_EQ(choose_mla_form(few, 512, 512), MlaForm::up_projected);
  for (const auto& change : std::vector<void (*)(AttentionSpec&)>{
           [](AttentionSpec& s) { s.batch_invariant = true; },
           [](AttentionSpec& s) { s.mask = MaskKind::tree; },
           [](AttentionSpec& s) { s.window = 64; }, [](AttentionSpec& s) { s.chunk = 64; },
           [](AttentionSpec& s) { s.scores.has_sinks = true; },
           [](AttentionSpec& s) { s.scores.has_alibi = true; }}) {
    AttentionSpec spec = deepseek;
    change(spec);
    EXPECT_EQ(choose_mla_form(spec, 512, 512), MlaForm::absorbed);
  }
}

// A batch by the bounds of its requests' new tokens and tokens.
struct HostLens {
  std::vector<int32_t> q_lens, kv_lens;
  MlaFormBounds bounds(int64_t max_context = 1 << 30) const {
    BatchView view;
    view.requests = static_cast<int32_t>(q_lens.size());
    view.hints.host_q_lens = q_lens;
    view.hints.host_kv_lens = kv_lens;
    return bound_mla_forms(test::deepseek_spec(), view, {view.requests, 1 << 20, 4096, 1 << 17},
                           max_context);
  }
};

TEST(MlaCost, HostLengthsTellPromptsFromDecodes) {
  const HostLens mixed{{1, 512, 4, 0, 200}, {4000, 512, 3000, 0, 9000}};
  const MlaFormBounds bounds = mixed.bounds();
  EXPECT_TRUE(bounds.by_q_len);
  EXPECT_EQ(bounds.min_q_len, 5);
  EXPECT_EQ(bounds.rows.all, 512 + 9000);
  EXPECT_EQ(bounds.rows.context, 512 + 9000 - 2 * 5);
  EXPECT_EQ(bounds.max_absorbed, 4);
  EXPECT_FALSE(mixed.bounds(9000).by_q_len) << "there is no room for all";

  const HostLens prompts{{20, 512}, {20, 600}};
  EXPECT_EQ(prompts.bounds().max_absorbed, 0) << "nobody is absorbed";
  EXPECT_EQ(prompts.bounds().min_q_len, 1);

  const HostLens decodes{{1, 1}, {20, 600}};
  EXPECT_EQ(decodes.bounds().rows.all, 0) << "nobody is up-projected";

  // 100 new tokens after 4000 are absorbed, 20 without context are not.
  const HostLens crossed{{100, 20}, {4100, 20}};
  EXPECT_FALSE(crossed.bounds().by_q_len);
  EXPECT_EQ(crossed.bounds().max_absorbed, 4096);
}

// A captured pass of few tokens has the absorbed form's kernels alone.
TEST(MlaCost, WithoutHostLengthsFewTokensAreAbsorbed) {
  const auto bounds = [](int32_t max_q_len, int32_t max_kv_len) {
    BatchView view;
    view.requests = 8;
    view.tokens = 400;
    return bound_mla_forms(test::deepseek_spec(), view, {8, 400, max_q_len, max_kv_len}, 1 << 30);
  };
  for (const int32_t max_q_len : {1, 15, 16, 128, 170}) {
    const MlaFormBounds few = bounds(max_q_len, 9000);
    EXPECT_EQ(few.rows.all, 0) << max_q_len;
    EXPECT_EQ(few.requests, 0) << max_q_len;
    EXPECT_EQ(few.max_absorbed, max_q_len);
  }
  const MlaFormBounds many = bounds(171, 9000);
  EXPECT_FALSE(many.by_q_len);
  EXPECT_EQ(many.rows.all, 8 * 9000);
  EXPECT_EQ(many.requests, 8);
  EXPECT_EQ(many.max_q_len, 171);
  EXPECT_EQ(many.max_kv_len, 9000);
  EXPECT_EQ(many.max_absorbed, 171) << "short prompts after long contexts";
}

// Checks the bounds for random lengths within the limits.
TEST(MlaCost, BoundsOfFormsHold) {
  const AttentionSpec spec = test::deepseek_spec();
  std::mt19937 random(5);
  const auto below = [&](int32_t end) {
    return static_cast<int32_t>(random() % static_cast<uint32_t>(end));
  };
  int32_t told_apart = 0;
  for (int32_t round = 0; round < 2000; ++round) {
    HostLens most;
    const int32_t requests = 1 + below(6);
    for (int32_t i = 0; i < requests; ++i) {
      const int32_t q_len = below(2) == 0 ? below(5) : below(400);
      most.q_lens.push_back(q_len);
      most.kv_lens.push_back(q_len + (below(2) == 0 ? 0 : below(5000)));
    }
    const MlaFormBounds bounds = most.bounds();
    told_apart += bounds.by_q_len;
    MlaRows rows;
    for (size_t i = 0; i < most.q_lens.size(); ++i) {
      const int32_t q_len = below(most.q_lens[i] + 1);
      const int32_t kv_len = q_len + below(most.kv_lens[i] - q_len + 1);
      if (q_len == 0) continue;
      const bool up = bounds.by_q_len
                          ? q_len >= bounds.min_q_len
                          : choose_mla_form(spec, q_len, kv_len) == MlaForm::up_projected;
      if (up) {
        rows.context += kv_len - q_len;
        rows.all += kv_len;
      } else {
        EXPECT_LE(q_len, bounds.max_absorbed);
      }
      // At the bounds the chosen forms are the cheaper ones.
      const bool cheaper =
          choose_mla_form(spec, most.q_lens[i], most.kv_lens[i]) == MlaForm::up_projected;
      EXPECT_TRUE(!bounds.by_q_len || (most.q_lens[i] >= bounds.min_q_len) == cheaper);
    }
    EXPECT_LE(rows.context, bounds.rows.context);
    EXPECT_LE(rows.all, bounds.rows.all);
  }
  EXPECT_GT(told_apart, 200);
  EXPECT_LT(told_apart, 1980);
}

}  // namespace
}  // namespace fovea
