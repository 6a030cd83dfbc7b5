// SPDX-License-Identifier: Apache-2.0
#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "engine/cache_contents.h"
#include "engine/tiny_caches.h"
#include "engine/tiny_requests.h"
#include "fovea/error.h"
#include "support/cases.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

TEST(Scheduler, DecodesComeBeforePromptsAndPromptsAreChunked) {
  CacheSet caches(tiny_cache_options({.pages = 100, .prefix_cache = false}));
  Scheduler scheduler(caches, {4, 8, 8});
  scheduler.add(make_request(1, 3, 10));
  ASSERT_EQ(scheduler.schedule().size(), 1u);
  run_pass(scheduler, caches);
  scheduler.add(make_request(2, 20, 10));
  std::vector<int32_t> lengths;
  for (int pass = 0; pass < 3; ++pass) {
    const std::span<const Chunk> chunks = scheduler.schedule();
    ASSERT_EQ(chunks.size(), 2u);
    EXPECT_EQ(chunks[0].request->id, 1);
    EXPECT_EQ(chunks[0].end - chunks[0].begin, 1);
    lengths.push_back(chunks[1].end - chunks[1].begin);
    run_pass(scheduler, caches);
  }
  EXPECT_EQ(lengths, (std::vector<int32_t>{7, 7, 6}));
}

TEST(Scheduler, AdmitsInOrder) {
  CacheSet caches(tiny_cache_options({.pages = 10, .prefix_cache = false}));
  Scheduler scheduler(caches, {4, 64, 8});
  scheduler.add(make_request(1, 24, 4));
  scheduler.add(make_request(2, 24, 4));  // does not fit in addition to the first
  scheduler.add(make_request(3, 2, 4));   // would fit, but arrived later
  const std::span<const Chunk> chunks = scheduler.schedule();
  ASSERT_EQ(chunks.size(), 1u);
  EXPECT_EQ(chunks[0].request->id, 1);
}

// A waiting request asks for room in every pass, but counts as one cache lookup.
TEST(Scheduler, CountsEachAdmissionOnce) {
  CacheSet caches(tiny_cache_options({.pages = 100, .window_pages = 4}));
  Scheduler scheduler(caches, {4, 64, 8});
  scheduler.add(make_request(1, 9, 6));
  scheduler.add(make_request(2, 9, 6));  // no window pages while the first runs
  ASSERT_EQ(scheduler.schedule().size(), 1u);
  while (!scheduler.idle()) run_pass(scheduler, caches);
  EXPECT_EQ(scheduler.preemptions(), 0);
  EXPECT_EQ(scheduler.prefix_queries(), 18);
  EXPECT_EQ(scheduler.prefix_hits(), 8);
}

TEST(Scheduler, ScoredPromptsShareTheLogitRows) {
  CacheSet caches(tiny_cache_options({.pages = 100}));
  Scheduler scheduler(caches, {4, 64, 5});
  auto scored = make_request(1, 12, 1);
  scored->sampling.prompt_logprobs = true;
  scheduler.add(std::move(scored));
  scheduler.add(make_request(2, 12, 1));
  std::span<const Chunk> chunks = scheduler.schedule();
  ASSERT_EQ(chunks.size(), 2u);
  EXPECT_EQ(chunks[0].end, 5);
  EXPECT_EQ(chunks[1].end, 12);
  EXPECT_EQ(scheduler.prefix_queries(), 12) << "a scored prompt is not looked up";
  // Another request takes the remaining rows; single tokens come first.
  scored = make_request(3, 12, 1);
  scored->sampling.prompt_logprobs = true;
  scheduler.add(std::move(scored));
  for (const Chunk& chunk : chunks) chunk.request->computed = chunk.end;
  scheduler.find(1)->computed = 9;
  scheduler.find(2)->tokens.push_back(1);
  chunks = scheduler.schedule();
  ASSERT_EQ(chunks.size(), 3u);
  EXPECT_EQ(chunks[0].request->id, 2);
  EXPECT_EQ(chunks[1].end, 12);
  EXPECT_EQ(chunks[2].end, 2);
}

TEST(Scheduler, DraftsTakeWhatOtherTokensLeave) {
  CacheSet caches(tiny_cache_options({.pages = 4, .prefix_cache = false}));
  Scheduler scheduler(caches, {4, 6, 8});
  scheduler.add(make_request(1, 4, 10));
  run_pass(scheduler, caches);
  std::span<const Chunk> chunks = scheduler.schedule();
  ASSERT_EQ(chunks.size(), 1u);
  EXPECT_EQ(scheduler.add_drafts(0, 9), 5) << "6 tokens a pass";
  EXPECT_EQ(chunks[0].end, 5);
  EXPECT_EQ(chunks[0].drafts, 5);
  EXPECT_EQ(chunks[0].request->lease.tokens, 10);
  caches.truncate(chunks[0].request->lease, 5);
  scheduler.add(make_request(2, 4, 10));
  chunks = scheduler.schedule();
  ASSERT_EQ(chunks.size(), 2u);
  EXPECT_EQ(scheduler.add_drafts(0, 9), 1) << "a token and a prompt of 4 come first";
  EXPECT_EQ(scheduler.add_drafts(0, 9), 0);
}

TEST(Scheduler, DraftsPreemptNobody) {
  CacheSet caches(tiny_cache_options({.pages = 4, .prefix_cache = false}));
  Scheduler scheduler(caches, {4, 32, 8});
  scheduler.add(make_request(1, 5, 10));
  scheduler.add(make_request(2, 3, 10));
  run_pass(scheduler, caches);
  const std::span<const Chunk> chunks = scheduler.schedule();
  ASSERT_EQ(chunks.size(), 2u);
  EXPECT_EQ(caches.pages().free_pages(), 1);
  EXPECT_EQ(scheduler.add_drafts(0, 7), 0) << "two slots of its page and another page are free";
  EXPECT_EQ(chunks[0].request->lease.tokens, 6);
  EXPECT_EQ(scheduler.add_drafts(0, 3), 3);
  EXPECT_EQ(scheduler.add_drafts(1, 1), 0);
  EXPECT_EQ(scheduler.preemptions(), 0);
}

TEST(Scheduler, DraftsNeedStates) {
  CacheSet caches(tiny_cache_options({.state_slots = 4, .prefix_cache = false}));
  Scheduler scheduler(caches, {4, 32, 8});
  scheduler.add(make_request(1, 5, 10));
  run_pass(scheduler, caches);
  const std::span<const Chunk> chunks = scheduler.schedule();
  EXPECT_EQ(scheduler.add_drafts(0, 4), 0) << "three states are free";
  EXPECT_EQ(chunks[0].request->lease.tokens, 6);
  EXPECT_EQ(scheduler.add_drafts(0, 3), 3);
}

TEST(Scheduler, RunsNoMoreThanItsLimit) {
  CacheSet caches(tiny_cache_options({.pages = 100, .max_requests = 4}));
  Scheduler scheduler(caches, {2, 64, 8});
  for (int64_t id = 1; id <= 3; ++id) scheduler.add(make_request(id, 4, 1));
  EXPECT_EQ(scheduler.schedule().size(), 2u);
}

TEST(Scheduler, ChunksOfLinearModelsEndAtPageBoundaries) {
  struct Case {
    int32_t prompt;
    bool prefix_cache;
    std::vector<int32_t> ends;
    int32_t cached;  // the part of the same prompt that is cached the second time
  };
  for (const Case& c : std::vector<Case>{
           {17, true, {8, 16, 17}, 16}, {16, true, {8, 12, 16}, 12}, {17, false, {10, 17}, 0}}) {
    CacheSet caches(
        tiny_cache_options({.pages = 100, .state_slots = 20, .prefix_cache = c.prefix_cache}));
    Scheduler scheduler(caches, {4, 10, 8});
    scheduler.add(make_request(1, c.prompt, 1));
    std::vector<int32_t> ends;
    while (!scheduler.idle()) {
      ends.push_back(scheduler.schedule()[0].end);
      run_pass(scheduler, caches);
    }
    EXPECT_EQ(ends, c.ends);
    scheduler.add(make_request(2, c.prompt, 1));
    EXPECT_EQ(scheduler.schedule()[0].begin, c.cached);
    EXPECT_EQ(scheduler.prefix_queries() > 0, c.prefix_cache);
  }
}

// Requests 1 and 3 have the cached prompt, request 2 has its own.
TEST(Scheduler, DecodesThatSharePagesAreNeighboursWhereThatSavesReads) {
  for (const bool group : {false, true}) {
    CacheSet caches(tiny_cache_options({.pages = 100}));
    Scheduler scheduler(caches, {4, 64, 8, group});
    scheduler.add(make_request(1, 12, 8));
    run_pass(scheduler, caches);
    scheduler.add(make_request(2, 12, 8, /*token=*/2));
    scheduler.add(make_request(3, 12, 8));
    run_pass(scheduler, caches);
    std::vector<int64_t> ids;
    for (const Chunk& chunk : scheduler.schedule()) ids.push_back(chunk.request->id);
    EXPECT_EQ(ids, group ? (std::vector<int64_t>{1, 3, 2}) : (std::vector<int64_t>{1, 2, 3}));
  }
}

TEST(Scheduler, PreemptsTheYoungestAndNeverTheOldest) {
  CacheSet caches(tiny_cache_options({.pages = 9, .max_context = 36, .prefix_cache = false}));
  Scheduler scheduler(caches, {4, 64, 8});
  for (int64_t id = 1; id <= 3; ++id) scheduler.add(make_request(id, 4, 30));
  int64_t oldest = 1;
  int passes = 0;
  for (; !scheduler.idle(); ++passes) {
    ASSERT_LT(passes, 500);
    while (scheduler.find(oldest) == nullptr) ++oldest;
    const int32_t before = scheduler.find(oldest)->length();
    run_pass(scheduler, caches);
    const Request* after = scheduler.find(oldest);
    EXPECT_TRUE(after == nullptr || after->length() == before + 1)
        << "request " << oldest << " made no progress";
  }
  EXPECT_GT(scheduler.preemptions(), 0);
  EXPECT_TRUE(caches.empty());
}

TEST(Scheduler, RemovalFreesWhatWasHeldInAnyState) {
  CacheSet caches(tiny_cache_options({.pages = 10, .prefix_cache = false}));
  Scheduler scheduler(caches, {2, 6, 8});
  for (int64_t id = 1; id <= 3; ++id) scheduler.add(make_request(id, 8, 4));
  run_pass(scheduler, caches);  // request 1 is in the middle of its prompt
  EXPECT_NE(scheduler.remove(1), nullptr);
  EXPECT_TRUE(caches.empty());
  EXPECT_NE(scheduler.remove(3), nullptr);  // it was waiting
  EXPECT_EQ(scheduler.remove(3), nullptr);
  run_pass(scheduler, caches);
  run_pass(scheduler, caches);  // request 2 decodes
  EXPECT_NE(scheduler.remove(2), nullptr);
  EXPECT_TRUE(caches.empty());
  EXPECT_TRUE(scheduler.idle());
}

TEST(Scheduler, ARequestThatCanNeverFitIsAnError) {
  CacheSet caches(tiny_cache_options({.pages = 3, .max_context = 40}));
  Scheduler scheduler(caches, {4, 64, 8});
  scheduler.add(make_request(1, 30, 1));
  EXPECT_THROW((void)scheduler.schedule(), Error);
}

// It is recomputed once and then refused, as further attempts would never end.
TEST(Scheduler, ARequestThatOutgrowsItsWindowPoolIsAnError) {
  CacheSet caches(
      tiny_cache_options({.pages = 10, .window_pages = 2, .window = 9, .prefix_cache = false}));
  Scheduler scheduler(caches, {4, 1, 8});
  scheduler.add(make_request(1, 1, 30));
  test::expect_error(ErrorCode::out_of_memory, "cannot hold 9 tokens of request 1 alone", [&] {
    for (int passes = 0; passes < 100; ++passes) run_pass(scheduler, caches);
  });
  EXPECT_EQ(scheduler.preemptions(), 1);
}

// Random arrivals, cancellations, ends and failed passes, for every kind of cache, in pools for
// little more than one request. A pass reads its own tokens after any preemption, eviction or
// sharing.
class Churn {
 public:
  Churn(const TinyCaches& tiny, int32_t batch, bool group_prefixes, uint32_t seed)
      : tiny_(tiny),
        batch_(batch),
        caches_(tiny_cache_options(tiny)),
        contents_(tiny, caches_),
        scheduler_(caches_, {tiny.max_requests, batch, kPromptRows, group_prefixes}),
        random_(seed) {}

  void run() {
    const int64_t total = 300 * test::test_scale();
    int empty_passes = 0;
    for (int64_t passes = 0; next_ <= total || !scheduler_.idle(); ++passes) {
      ASSERT_LT(passes, 300 * total) << "no progress";
      if (next_ <= total && draw(4) == 0) add();
      if (draw(16) == 0) scheduler_.remove(draw(static_cast<int32_t>(next_)));
      if (draw(64) == 0) caches_.clear();
      const bool idle = scheduler_.idle();
      const int32_t computed = pass();
      if (::testing::Test::HasFailure()) return;
      EXPECT_LE(computed, batch_);
      // A pass may compute nothing only if the last request gives everything back in it.
      empty_passes = computed == 0 && !idle ? empty_passes + 1 : 0;
      EXPECT_LE(empty_passes, 1);
    }
    caches_.clear();
    EXPECT_TRUE(caches_.empty());
    EXPECT_GT(scheduler_.preemptions(), 0);
    EXPECT_GT(drafts_, 0);
    EXPECT_EQ(scheduler_.prefix_hits() > 0, tiny_.prefix_cache);
  }

 private:
  static constexpr int32_t kPromptRows = 8;
  static constexpr int32_t kDraft = 9;  // no token of a text; all drafts are rejected

  int32_t draw(int32_t below) {
    return static_cast<int32_t>(random_() % static_cast<uint32_t>(below));
  }

  // Adds a request for one of three texts, up to a point where it differs.
  void add() {
    const int32_t prompt = 1 + draw(30), fork = draw(40);
    auto request = make_request(next_++, prompt, 1 + draw(tiny_.max_context - prompt), draw(3));
    for (size_t i = static_cast<size_t>(fork); i < request->tokens.size(); ++i)
      request->tokens[i] = draw(3);
    request->sampling.prompt_logprobs = draw(4) == 0;
    if (draw(4) == 0) request->salt = "another";
    scheduler_.add(std::move(request));
  }

  // Does the work of TextEngine::step() without a model. Returns the number of computed tokens.
  int32_t pass() {
    const std::span<const Chunk> scheduled = scheduler_.schedule();
    for (size_t i = 0; i < scheduled.size(); ++i) {
      const Request& request = *scheduled[i].request;
      if (request.remaining() != 1) continue;
      scheduler_.add_drafts(i, std::min(draw(6), tiny_.max_context - request.length()));
    }
    const std::vector<Chunk> chunks(scheduled.begin(), scheduled.end());
    int32_t computed = 0, scored = 0;
    for (const Chunk& chunk : chunks) {
      const Request& request = *chunk.request;
      const int32_t cached = cached_.try_emplace(request.id, chunk.begin).first->second;
      EXPECT_EQ(request.cached_tokens, cached) << "at its first admission";
      if (request.scores_prompt()) scored += chunk.end - chunk.begin;
      EXPECT_EQ(chunk.begin, request.computed);
      EXPECT_LT(chunk.begin, chunk.end);
      EXPECT_LE(chunk.end, request.length());
      std::vector<int32_t> tokens = request.tokens;
      tokens.resize(tokens.size() + static_cast<size_t>(chunk.drafts), kDraft);
      contents_.compute(request.lease, tokens, request.salt, chunk.begin, chunk.end + chunk.drafts);
      computed += chunk.end - chunk.begin + chunk.drafts;
      drafts_ += chunk.drafts;
    }
    EXPECT_LE(scored, kPromptRows);
    if (draw(64) == 0) {  // the pass fails
      while (scheduler_.preempt_youngest()) {
      }
      for (const Chunk& chunk : chunks) EXPECT_EQ(chunk.request->computed, 0);
      return computed;
    }
    for (const Chunk& chunk : chunks) {
      caches_.truncate(chunk.request->lease, chunk.drafts > 0 ? chunk.end : tiny_.max_context);
      accept(*chunk.request, chunk.end);
    }
    return computed;
  }

  void accept(Request& request, int32_t end) {
    request.computed = end;
    const auto publish = [&] {
      caches_.publish(request.lease,
                      {std::span(request.tokens).first(static_cast<size_t>(end)), request.salt});
    };
    if (end <= request.prompt_tokens) publish();
    if (request.remaining() > 0) return;
    request.tokens.push_back(draw(3));
    const bool ends = request.generated() == request.sampling.max_new_tokens || draw(32) == 0;
    if (!ends) return;
    publish();
    scheduler_.remove(request.id);
  }

  TinyCaches tiny_;
  int32_t batch_;
  CacheSet caches_;
  CacheContents contents_;
  Scheduler scheduler_;
  std::mt19937 random_;
  std::map<int64_t, int32_t> cached_;  // tokens of each request
  int64_t next_ = 1, drafts_ = 0;
};

TEST(Scheduler, ChurnInTinyPools) {
  Churn({.pages = 12}, 16, false, 1).run();
  Churn({.page_size = 1, .pages = 48}, 16, true, 2).run();
  Churn({.pages = 12, .prefix_cache = false}, 5, false, 3).run();
  Churn({.pages = 16, .window_pages = 8}, 16, true, 4).run();
  Churn({.pages = 12, .state_slots = 5}, 16, true, 5).run();
  Churn({.pages = 12, .window_pages = 7, .state_slots = 4}, 16, false, 6).run();
  Churn({.page_size = 3, .pages = 16, .window_pages = 8, .window = 5}, 7, true, 7).run();
  // Room for a single request: a prefix that is cached twice must be evicted.
  Churn({.pages = 10, .window_pages = 6, .window = 9, .state_slots = 3}, 4, false, 1).run();
}

}  // namespace
}  // namespace fovea
