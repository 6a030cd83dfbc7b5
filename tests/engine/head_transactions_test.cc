// SPDX-License-Identifier: Apache-2.0
// Random transactions of requests for which a head drafts: they find prefixes, accept any number of
// drafts, are preempted, cancelled and end, in caches that are often full. Model and head are
// naive. A feature is a hash of the text up to its token. The head's hidden state is a hash of its
// input and of the sum of all its entries before, which its attention reads from its cache: keys
// are 0, so that a result is the mean of all values. Drafts must be those of the text alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "engine/draft_model.h"
#include "engine/model_drafter.h"
#include "engine/tiny_caches.h"
#include "support/cases.h"

namespace fovea {
namespace {

constexpr int32_t kVocabulary = 3;  // few, so that drafts are often right
constexpr int32_t kContext = 60, kMaxRequests = 5, kMaxDrafts = 6, kBranches = 2, kDim = 8;

// Hashes have 20 bits, which f32 holds.
uint32_t mix(uint32_t hash, uint32_t value) {
  return ((hash ^ (value + 1)) * 2654435761u) >> 7 & 0xfffff;
}
uint32_t value_of(uint32_t feature, int32_t token) {
  return mix(feature, static_cast<uint32_t>(token)) & 1023;
}
uint32_t hidden_of(uint32_t feature, int32_t token, uint32_t sum) {
  return mix(mix(feature, static_cast<uint32_t>(token) + 77), sum);
}

// Returns the token that follows a text of two tokens at least and some drafts.
int32_t next_after(std::vector<int32_t> text, const std::vector<int32_t>& drafts) {
  const size_t length = text.size();
  text.insert(text.end(), drafts.begin(), drafts.end());
  uint32_t prefix = 0, sum = 0, hidden = 0;
  for (size_t i = 0; i + 1 < text.size(); ++i) {
    prefix = mix(prefix, static_cast<uint32_t>(text[i]));
    const uint32_t feature = i + 1 < length ? prefix : hidden;
    sum += value_of(feature, text[i + 1]);
    hidden = hidden_of(feature, text[i + 1], sum);
  }
  return static_cast<int32_t>(hidden % kVocabulary);
}

// Returns the last token of the text, and the drafts after it.
std::vector<int32_t> chain_after(const std::vector<int32_t>& text, int32_t drafts) {
  std::vector<int32_t> chain;
  for (int32_t i = 0; i < drafts; ++i) chain.push_back(next_after(text, chain));
  chain.insert(chain.begin(), text.back());
  return chain;
}

class NaiveHead final : public EagleHead {
 public:
  explicit NaiveHead(ThreadPool& threads) : device_(make_host_device(threads)) {
    info_ = {.architecture = "Naive",
             .layers = 1,
             .hidden = 1,
             .vocabulary = kVocabulary,
             .max_context = kContext,
             .default_context = kContext};
    AttentionSpec spec;
    spec.q_heads = spec.kv_heads = 1;
    spec.head_dim = spec.head_dim_v = kDim;
    info_.groups.push_back({spec, {0}, {}});
  }
  const ModelInfo& info() const override { return info_; }
  ModelDevice& device() const override { return *device_; }
  EmbeddingTable embedding() const override { return {}; }
  Linear head() const override { return {}; }
  void set_tap(FeatureTap) override {}
  size_t weight_bytes() const override { return 0; }
  size_t activation_bytes(int32_t) const override { return 0; }
  size_t position_bytes(int32_t) const override { return 0; }
  void reserve(int32_t, int32_t) override {}
  const FeatureTap& tap() const override { return tap_; }
  size_t feature_bytes(int64_t slots, int32_t max_tokens) const override {
    return static_cast<size_t>(slots + max_tokens) * sizeof(float);
  }
  FeatureTap reserve_features(int64_t slots, int32_t max_tokens) override {
    slots_ = static_cast<size_t>(slots);
    table_.resize(slots_ + static_cast<size_t>(max_tokens));
    return tap_;
  }

  void forward(const ModelInputs& inputs, std::span<AttentionBackend* const> backends) override {
    const size_t rows = inputs.tokens.size();
    std::vector<uint32_t> features(rows);
    std::vector<float> zeros(rows * kDim), values(rows * kDim), means(rows * kDim);
    for (size_t row = 0; row < rows; ++row) {
      features[row] = static_cast<uint32_t>(table_[static_cast<size_t>(inputs.features[row])]);
      std::fill_n(values.begin() + static_cast<int64_t>(row * kDim), kDim,
                  static_cast<float>(value_of(features[row], inputs.tokens[row])));
    }
    LayerTensors tensors;
    tensors.q = tensors.k = dense_rows(zeros.data(), DType::f32, 1, kDim);
    tensors.v = dense_rows(values.data(), DType::f32, 1, kDim);
    tensors.out = dense_rows(means.data(), DType::f32, 1, kDim);
    backends[0]->forward(tensors, device_->stream());
    hidden_.clear();
    for (const int32_t row : inputs.logit_rows) {
      const auto at = static_cast<size_t>(row);
      const double sum = static_cast<double>(means[at * kDim]) * (inputs.positions[at] + 1);
      hidden_.push_back(
          hidden_of(features[at], inputs.tokens[at], static_cast<uint32_t>(std::lround(sum))));
      table_[slots_ + hidden_.size() - 1] = static_cast<float>(hidden_.back());
    }
  }
  void logits(int64_t first_row, std::span<float> logits) override {
    std::ranges::fill(logits, 0.0f);
    for (size_t row = 0; row < logits.size() / kVocabulary; ++row) {
      const uint32_t hidden = hidden_[static_cast<size_t>(first_row) + row];
      logits[row * kVocabulary + hidden % kVocabulary] = 1;
    }
  }
  // Stores the feature of a token that the model has computed.
  void note(int32_t slot, uint32_t feature) {
    table_[static_cast<size_t>(slot)] = static_cast<float>(feature);
  }

 private:
  std::shared_ptr<ModelDevice> device_;
  ModelInfo info_;
  FeatureTap tap_;
  size_t slots_ = 0;
  std::vector<float> table_;
  std::vector<uint32_t> hidden_;
};

class World {
 public:
  World(bool runner_draws, int32_t branches, uint32_t seed)
      : random_(seed),
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
    options.max_batch_tokens = 24;  // prompts are computed in pieces
    options.max_context = kContext;
    options.max_drafts = kMaxDrafts;
    options.draft_branches = branches;
    options.kv_memory_bytes = size_t{40} * 4 * 2 * kDim * sizeof(float);
    head_->reserve_features(caches_.slots(), options.max_batch_tokens);
    drafter_ = make_model_drafter(draft_, size_draft_model(draft_, cpu_device()), threads_, caches_,
                                  runner_draws);
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
    for (Request* const request : running) {
      const bool computes = request->length() > 1;
      const int32_t count = computes ? std::min(wanted, request->max_drafts()) : 0;
      std::vector<int32_t> expected = chain_after(request->tokens, count);
      const DraftTree& drafts = request->drafts;
      ASSERT_LE(drafts.drafts(), count);
      without_memory_ += drafts.drafts() < count;
      if (drafts.parents.empty()) {
        expected.resize(drafts.tokens.size());
        ASSERT_EQ(drafts.tokens, expected) << "after " << request->length() << " tokens";
      } else {
        check_tree(*request);
        keep_path(*request);
      }
      verify(*request, drafts.drafts());
    }
    std::erase_if(requests_, [](const auto& request) { return request->id < 0; });
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

  void verify(Request& request, int32_t drafts) {
    const int32_t length = request.length();
    while (drafts > 0 && !caches_.extend(request.lease, length - 1, length + drafts)) --drafts;
    if (drafts == 0 && !caches_.extend(request.lease, length - 1, length)) return preempt(request);
    std::vector<int32_t> guessed = request.tokens;
    const std::vector<int32_t>& chain = request.drafts.tokens;
    guessed.insert(guessed.end(), chain.begin() + 1, chain.begin() + 1 + drafts);
    note(request, length - 1, length + drafts, guessed);
    const auto accepted = static_cast<int32_t>(pick(static_cast<size_t>(drafts) + 1));
    guessed.resize(static_cast<size_t>(length + accepted));
    request.tokens = guessed;
    request.tokens.push_back(token());
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
  const int32_t branches_;
  ThreadPool threads_{1};
  const BackendRegistry registry_ = BackendRegistry::builtin();
  CacheSet caches_;
  DraftModel draft_;
  NaiveHead* head_ = nullptr;
  std::unique_ptr<Drafter> drafter_;
  std::vector<std::unique_ptr<Request>> requests_;
  int64_t next_id_ = 1, accepted_steps_ = 0;
  int64_t hits_ = 0, preempted_ = 0, without_memory_ = 0, accepted_ = 0, rejected_ = 0;
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
