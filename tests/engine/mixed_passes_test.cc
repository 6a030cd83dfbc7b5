// SPDX-License-Identifier: Apache-2.0
// Passes that compute decodes and prompts: the scheduler limits their prompts.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "engine/scheduler.h"
#include "engine/tiny_caches.h"
#include "engine/tiny_requests.h"

namespace fovea {
namespace {

// Returns the tokens of each chunk that schedule() gives, and computes nothing.
std::vector<int32_t> scheduled_tokens(Scheduler& scheduler) {
  std::vector<int32_t> tokens;
  for (const Chunk& chunk : scheduler.schedule()) tokens.push_back(chunk.end - chunk.begin);
  return tokens;
}

TEST(MixedPasses, PromptsTakeWhatDecodesLeaveOfAMixedPass) {
  CacheSet caches(tiny_cache_options({.pages = 100, .prefix_cache = false}));
  Scheduler scheduler(caches, {.max_running = 4,
                               .max_batch_tokens = 60,
                               .max_prompt_rows = 8,
                               .max_drafts = 40,
                               .max_mixed_tokens = 24});
  scheduler.add(make_request(1, 30, 10));
  scheduler.add(make_request(2, 20, 10));
  EXPECT_EQ(scheduled_tokens(scheduler), (std::vector<int32_t>{30, 20})) << "nobody decodes";
  run_pass(scheduler, caches);
  scheduler.add(make_request(3, 30, 10));
  scheduler.add(make_request(4, 30, 10));
  EXPECT_EQ(scheduled_tokens(scheduler), (std::vector<int32_t>{1, 1, 22}));
  EXPECT_EQ(scheduler.add_drafts(0, 40), 36) << "drafts are bounded by max_batch_tokens";
}

// Decodes alone exceed max_mixed_tokens, or leave little of it or of max_batch_tokens.
TEST(MixedPasses, NoNumberOfDecodesStarvesAPrompt) {
  struct Limits {
    int32_t max_mixed_tokens, max_batch_tokens;
    std::vector<int32_t> tokens;
  };
  for (const auto& [mixed, batch, tokens] :
       {Limits{1, 60, {1, 1, 1, 16}}, Limits{18, 60, {1, 1, 1, 16}}, Limits{20, 60, {1, 1, 1, 17}},
        Limits{1, 9, {1, 1, 1, 6}}}) {
    CacheSet caches(tiny_cache_options({.pages = 100, .prefix_cache = false}));
    Scheduler scheduler(caches, {.max_running = 4,
                                 .max_batch_tokens = batch,
                                 .max_prompt_rows = 8,
                                 .max_mixed_tokens = mixed});
    for (int64_t id = 1; id <= 3; ++id) scheduler.add(make_request(id, 3, 10));
    run_pass(scheduler, caches);
    scheduler.add(make_request(4, 30, 10));
    EXPECT_EQ(scheduled_tokens(scheduler), tokens) << mixed << " of " << batch;
  }
}

}  // namespace
}  // namespace fovea
