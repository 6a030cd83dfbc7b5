// SPDX-License-Identifier: Apache-2.0
// Random transactions of requests for which a head drafts: they find prefixes, accept any number of
// drafts, are preempted, cancelled and end, in caches that are often full. Model and head are
// naive. Drafts must be those of the text alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "engine/draft_model.h"
#include "engine/model_drafter.h"
#include "engine/naive_head.h"
#include "engine/tiny_caches.h"
#include "support/cases.h"

namespace fovea {
namespace {

using namespace naive;

class World {
 public:
  World(bool runner_draws, int32_t branches, uint32_t seed)
      : random_(seed),
        runner_draws_(runner_draws),
        branches_(branches),
        caches_(tiny_cache_options(
            {.pages = 50, .max_requests = kMaxRequests, .max_context = kContext})) {
    auto head = std::make_unique<NaiveHead>(threads_);
    head_ = head.get();
    draft_ = {std::move(head), {}, head_};
    EngineOptions& options = draft_.options;
    options.model_path = "naive";
    options.registry = &registry_;
    options.page_size = 4;
    options.max_requests = kMaxRequests;
    options.max_batch_tokens = kMaxBatchTokens;  // prompts are computed in pieces
    options.max_context = kContext;
    options.max_drafts = kMaxDrafts;
    options.draft_branches = branches;
    options.kv_memory_bytes = size_t{40} * 4 * 2 * kDim * sizeof(float);
    head_->reserve_features(caches_.slots(), options.max_batch_tokens);
    drafter_ = make_model_drafter(draft_, size_draft_model(draft_, cpu_device()), threads_, caches_,
                                  runner_draws, {model_draws_, drafter_draws_});
  }

  void run(int64_t transactions) {
    while (accepted_steps_ < transactions && !::testing::Test::HasFailure()) {
      const size_t choice = pick(24);
      if (requests_.empty() || (choice < 3 && requests_.size() < kMaxRequests)) {
        add();
      } else if (choice == 3) {
        end(pick(requests_.size()), pick(2) == 0);
      } else if (choice == 4) {
        preempt(*requests_[pick(requests_.size())]);
      } else if (choice == 5 && pick(20) == 0) {
        caches_.clear();
        drafter_->clear();
      } else {
        speculate();
      }
    }
    while (!requests_.empty()) end(0, false);
    caches_.clear();
    EXPECT_TRUE(caches_.empty());
    EXPECT_GT(hits_, 100);
    EXPECT_GT(preempted_, 100);
    EXPECT_GT(without_memory_, 100) << "the head's caches were never full";
    EXPECT_GT(accepted_, transactions / branches_);
    EXPECT_GT(rejected_, transactions / branches_);
    if (branches_ > 1) return;
    EXPECT_GT(without_token_, 100);
    EXPECT_EQ(left_ > 100, runner_draws_) << left_;
    EXPECT_GT(begun_, 100);
  }

 private:
  size_t pick(size_t count) { return random_() % count; }
  int32_t token() { return static_cast<int32_t>(pick(kVocabulary)); }

  // Adds a request whose prompt begins as others do.
  void add() {
    auto request = std::make_unique<Request>();
    const size_t length = 1 + pick(30), shared = pick(30), text = pick(3);
    for (size_t i = 0; i < length; ++i)
      request->tokens.push_back(i < shared ? static_cast<int32_t>((i * i + text) % 3) : token());
    if (pick(4) == 0) request->salt = "another";
    request->id = next_id_++;
    request->max_length = kContext;
    request->sampling.temperature = 0;
    if (admit(*request)) requests_.push_back(std::move(request));
  }

  // Computes all tokens but the last one, as passes of the model do.
  bool admit(Request& request) {
    std::optional<CacheLease> lease =
        caches_.admit({request.tokens, request.salt}, true, static_cast<int64_t>(requests_.size()));
    if (!lease) return false;
    request.lease = std::move(*lease);
    hits_ += request.lease.cached_tokens > 0;
    const int32_t end = request.length() - 1;
    EXPECT_TRUE(caches_.extend(request.lease, request.lease.cached_tokens, request.length()));
    note(request, request.lease.cached_tokens, end, request.tokens);
    publish(request, end);
    return true;
  }

  void note(const Request& request, int32_t begin, int32_t end, const std::vector<int32_t>& text) {
    uint32_t prefix = 0;
    const std::span<const int32_t> slots = caches_.table().row(request.lease.row);
    for (int32_t i = 0; i < end; ++i) {
      prefix = mix(prefix, static_cast<uint32_t>(text[static_cast<size_t>(i)]));
      if (i >= begin) head_->note(slots[static_cast<size_t>(i)], prefix);
    }
  }
  void publish(Request& request, int32_t count) {
    const std::span<const int32_t> text = request.tokens;
    caches_.publish(request.lease, {text.first(static_cast<size_t>(count)), request.salt});
  }

  void end(size_t index, bool finished) {
    Request& request = *requests_[index];
    if (finished && request.lease.row > 0) publish(request, request.length() - 1);
    drafter_->forget(request.id);
    caches_.release(request.lease);
    requests_.erase(requests_.begin() + static_cast<int64_t>(index));
  }
  void preempt(Request& request) {
    preempted_ += request.lease.row > 0;
    caches_.release(request.lease);
  }

  // Drafts for all requests that hold memory, and accepts some of the drafts of each.
  void speculate() {
    std::vector<Request*> running;
    for (const auto& request : requests_) {
      if (request->lease.row == 0 && !admit(*request)) continue;
      running.push_back(request.get());
    }
    const auto wanted = static_cast<int32_t>(1 + pick(kMaxDrafts));
    drafter_->draft(running, wanted, branches_);
    if (!finish(running)) return;
    for (Request* const request : running) {
      const bool computes = request->length() > 1;
      const int32_t count = computes ? std::min(wanted, request->max_drafts()) : 0;
      std::vector<int32_t> expected = chain_after(request->tokens, count);
      const DraftTree& drafts = request->drafts;
      ASSERT_LE(drafts.drafts(), count);
      if (drafts.parents.empty()) {
        without_token_ += static_cast<int32_t>(expected.size()) <= count;
        if (drafts.tokens.back() == DraftTree::kUnknown) {
          request->drafts.keep(drafts.drafts() - 1);
          ASSERT_EQ(drafts.tokens.size(), expected.size());
        }
        without_memory_ += drafts.tokens.size() < expected.size();
        ASSERT_LE(drafts.tokens.size(), expected.size());
        expected.resize(drafts.tokens.size());
        ASSERT_EQ(drafts.tokens, expected) << "after " << request->length() << " tokens";
      } else {
        without_memory_ += drafts.drafts() < count;
        check_tree(*request);
        keep_path(*request);
      }
      compute(*request, drafts.drafts());
    }
    draw(running);
    for (Request* const request : running) {
      if (request->lease.row > 0) accept(*request);
    }
    if (pick(20) == 0) {  // steps without drafts
      drafter_->finish();
      for (int64_t steps = 1 + static_cast<int64_t>(pick(3)); steps > 0; --steps) {
        for (Request* const request : running) {
          if (request->id < 0 || request->lease.row == 0 || !compute(*request, 0)) continue;
          draws_[request->id] = {token()};
          accept(*request);
        }
      }
    }
    std::erase_if(requests_, [](const auto& request) { return request->id < 0; });
  }

  // Makes all drafts known, as an engine does after it has enqueued their verification, for which
  // it may have cut them. Returns false if it gives them up.
  bool finish(const std::vector<Request*>& running) {
    std::vector<std::pair<Request*, int32_t>> left;
    for (Request* const request : running) {
      DraftTree& drafts = request->drafts;
      if (drafts.drawn_by >= 0 && pick(8) == 0) {
        drafts.keep(static_cast<int32_t>(pick(static_cast<size_t>(drafts.drafts()))));
      }
      EXPECT_EQ(drafts.drawn_by >= 0, drafts.tokens.back() == DraftTree::kUnknown);
      if (drafts.drawn_by >= 0) left.emplace_back(request, drafts.drawn_by);
    }
    if (pick(50) == 0) {
      drafter_->abandon();
      return false;
    }
    drafter_->finish();
    for (const auto& [request, draw] : left) {
      EXPECT_EQ(request->drafts.tokens.back(), drafter_draws_[draw]);
      EXPECT_LT(request->drafts.drawn_by, 0);
      ++left_;
    }
    return true;
  }

  // A node's first child is the token after its path. All tokens but the likeliest are equally
  // unlikely, and the first of them is the second child.
  void check_tree(const Request& request) {
    const DraftTree& tree = request.drafts;
    for (int32_t node = 0; node <= tree.drafts(); ++node) {
      std::vector<int32_t> text = request.tokens, path;
      for (int32_t i = node; i > 0; i = tree.parent(i)) path.push_back(i);
      const int32_t depth = static_cast<int32_t>(path.size());
      const std::vector<int32_t> children = children_of(tree, node);
      ASSERT_LE(children.size(), static_cast<size_t>(kBranches));
      if (children.empty()) continue;
      std::vector<int32_t> drafts;
      for (size_t i = path.size(); i-- > 0;) {
        drafts.push_back(tree.tokens[static_cast<size_t>(path[i])]);
      }
      ASSERT_EQ(children.front(), next_after(text, drafts))
          << "node " << node << " of depth " << depth;
      if (children.size() > 1) {
        ASSERT_EQ(children[1], children[0] == 0 ? 1 : 0);
      }
    }
  }
  static std::vector<int32_t> children_of(const DraftTree& tree, int32_t node) {
    std::vector<int32_t> children;
    for (int32_t next = node + 1; next <= tree.drafts(); ++next) {
      if (tree.parent(next) == node) children.push_back(tree.tokens[static_cast<size_t>(next)]);
    }
    return children;
  }
  // Leaves a random path of the tree, which the model verifies.
  void keep_path(Request& request) {
    const DraftTree tree = request.drafts;
    DraftTree& path = request.drafts;
    path.begin(tree.tokens.front());
    for (int32_t node = 0;;) {
      const std::vector<int32_t> children = children_of(tree, node);
      if (children.empty()) return;
      path.tokens.push_back(children[pick(children.size())]);
      node = tree.find(node, path.tokens.back());
    }
  }

  // Computes the last token and the first of its drafts that find memory. Returns false if it
  // preempts the request.
  bool compute(Request& request, int32_t drafts) {
    const int32_t length = request.length();
    while (drafts > 0 && !caches_.extend(request.lease, length - 1, length + drafts)) --drafts;
    if (drafts == 0 && !caches_.extend(request.lease, length - 1, length)) {
      preempt(request);
      return false;
    }
    request.drafts.keep(drafts);
    std::vector<int32_t> guessed = request.tokens;
    const std::vector<int32_t>& chain = request.drafts.tokens;
    guessed.insert(guessed.end(), chain.begin() + 1, chain.end());
    note(request, length - 1, length + drafts, guessed);
    return true;
  }

  // Draws what follows the last tokens and their drafts, of which any number is right. The drafter
  // may go on with some of the texts, of which it knows no more than where they are.
  void draw(const std::vector<Request*>& running) {
    std::vector<DrawnText> texts;
    int32_t count = 0;
    for (Request* const request : running) {
      if (request->lease.row == 0) continue;
      const int32_t drafts = request->drafts.drafts();
      const size_t right = pick(static_cast<size_t>(drafts) + 1);
      const std::vector<int32_t>& chain = request->drafts.tokens;
      std::vector<int32_t>& draws = draws_[request->id];
      draws.assign(chain.begin() + 1, chain.begin() + 1 + static_cast<int64_t>(right));
      draws.push_back(token());
      if (drafts == 0 || count + drafts + 1 > kMaxBatchTokens || pick(8) == 0) continue;
      texts.push_back({request, count, drafts + 1});
      std::ranges::copy(draws, model_draws_ + count);
      for (int32_t i = static_cast<int32_t>(draws.size()); i <= drafts; ++i) {
        model_draws_[count + i] = static_cast<int32_t>(pick(kVocabulary + 1)) - 1;
      }
      count += drafts + 1;
    }
    if (branches_ > 1 || texts.empty() || pick(8) == 0) return;
    drafter_->begin_next(texts);
    ++begun_;
  }

  // The drawn tokens become text: the last one is no draft.
  void accept(Request& request) {
    const int32_t length = request.length(), drafts = request.drafts.drafts();
    const std::vector<int32_t>& draws = draws_.at(request.id);
    const auto accepted = static_cast<int32_t>(draws.size()) - 1;
    request.tokens.insert(request.tokens.end(), draws.begin(), draws.end());
    caches_.truncate(request.lease, length + accepted);
    ++accepted_steps_;
    accepted_ += accepted;
    rejected_ += drafts - accepted;
    if (request.length() < kContext) return;
    drafter_->forget(request.id);
    caches_.release(request.lease);
    request.id = -1;
  }

  std::mt19937 random_;
  const bool runner_draws_;
  const int32_t branches_;
  int32_t model_draws_[kMaxBatchTokens] = {}, drafter_draws_[kMaxBatchTokens] = {};
  std::map<int64_t, std::vector<int32_t>> draws_;  // after the tokens of a step, by the request
  ThreadPool threads_{1};
  const BackendRegistry registry_ = BackendRegistry::builtin();
  CacheSet caches_;
  DraftModel draft_;
  NaiveHead* head_ = nullptr;
  std::unique_ptr<Drafter> drafter_;
  std::vector<std::unique_ptr<Request>> requests_;
  int64_t next_id_ = 1, accepted_steps_ = 0;
  int64_t hits_ = 0, preempted_ = 0, without_memory_ = 0, accepted_ = 0, rejected_ = 0;
  int64_t without_token_ = 0, left_ = 0, begun_ = 0;
};

TEST(HeadTransactions, DraftsAreThoseOfTheTextAlone) {
  const int64_t transactions = 50'000 * test::test_scale();
  for (const int32_t branches : {1, kBranches}) {
    World(false, branches, 1).run(transactions);
    World(true, branches, 2).run(transactions);
  }
}

}  // namespace
}  // namespace fovea
