// SPDX-License-Identifier: Apache-2.0
// Random transactions over the states of a linear layer on the CPU. Requests come, from cached
// states too, verify drafts that are accepted, rejected and rolled back, are preempted and go.
// Every accepted token must have the bits of a twin that computes one token after the other.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "fovea/select_backend.h"
#include "fovea/speculation.h"
#include "support/cases.h"

namespace fovea {
namespace {

constexpr int32_t kMaxRequests = 5, kWidth = 4, kContext = 48, kPage = 8, kCached = 3;
constexpr int32_t kTokens = 2;  // few, so that drafts are often right

AttentionSpec layer_spec() {
  AttentionSpec spec{.kind = AttentionKind::gated_delta_net, .batch_invariant = true};
  spec.linear = {.key_heads = 1, .value_heads = 2, .key_dim = 4, .value_dim = 3, .conv_width = 3};
  return spec;
}

using Text = std::vector<int32_t>;

uint32_t hash_of(const Text& text, size_t length) {
  uint32_t hash = 2166136261u;
  for (size_t i = 0; i < length; ++i) hash = (hash ^ static_cast<uint32_t>(text[i])) * 16777619u;
  return hash;
}

// The model's token after the first `length` tokens of a text.
int32_t token_after(const Text& text, size_t length) {
  return static_cast<int32_t>((hash_of(text, length) >> 9) % kTokens);
}

// The inputs of a pass: those of a token depend on the text up to it.
struct Inputs {
  std::vector<float> mixed, log_decay, beta;
  std::vector<int32_t> q_indptr = {0}, kv_lens, slots;

  // Adds a request with `count` tokens behind the first `begin` of its text.
  void add(const Text& text, int32_t begin, int32_t count, int32_t slot) {
    const LinearSpec linear = layer_spec().linear;
    for (int32_t i = 0; i < count; ++i) {
      std::minstd_rand random(1 + hash_of(text, static_cast<size_t>(begin + i) + 1) % 100'000);
      const auto draw = [&] { return static_cast<float>(random() % 2001) / 1000 - 1; };
      for (int32_t k = 0; k < linear.conv_dim(); ++k) mixed.push_back(draw());
      for (int32_t k = 0; k < linear.value_heads; ++k) log_decay.push_back(-0.2f + draw() / 8);
      for (int32_t k = 0; k < linear.value_heads; ++k) beta.push_back(0.5f + draw() / 4);
    }
    q_indptr.push_back(q_indptr.back() + count);
    kv_lens.push_back(begin + count);
    slots.push_back(slot);
  }
  BatchView batch() const {
    BatchView batch{.mode = ForwardMode::mixed};
    batch.requests = static_cast<int32_t>(slots.size());
    batch.tokens = q_indptr.back();
    batch.q_indptr = q_indptr;
    batch.kv_lens = kv_lens;
    batch.linear.state_slots = slots;
    return batch;
  }
};

// A layer over a pool of its own.
class Layer {
 public:
  Layer(ThreadPool& threads, int32_t slots, int32_t max_drafts) {
    const AttentionSpec spec = layer_spec();
    pool_ = make_state_pool({.layers = 1,
                             .conv_dim = spec.linear.conv_dim(),
                             .conv_width = spec.linear.conv_width,
                             .heads = spec.linear.value_heads,
                             .rows = spec.linear.value_dim,
                             .columns = spec.linear.key_dim,
                             .max_drafts = max_drafts,
                             .draft_inputs = max_drafts > 0 ? draft_row(spec).size : 0},
                            slots);
    backend_ = BackendRegistry::builtin().find("linear")->create(
        {.spec = spec, .state = pool_.get(), .threads = &threads});
    backend_->reserve({.max_requests = kMaxRequests,
                       .max_tokens = kMaxRequests * kContext,
                       .max_q_len = kContext,
                       .max_kv_len = kContext});
    std::mt19937 random(3);
    const auto channels = static_cast<size_t>(spec.linear.conv_dim() * spec.linear.conv_width);
    for (size_t i = 0; i < channels; ++i) {
      weight_.push_back(static_cast<float>(random() % 1000) / 1000);
    }
  }

  StatePool& pool() { return *pool_; }

  std::vector<float> run(const BatchView& batch, const Inputs& inputs) {
    const LinearSpec linear = layer_spec().linear;
    std::vector<float> out(static_cast<size_t>(batch.tokens * linear.value_heads) *
                           static_cast<size_t>(linear.value_dim));
    LayerTensors tensors;
    tensors.out = dense_rows(out.data(), DType::f32, linear.value_heads, linear.value_dim);
    tensors.linear = {.mixed = inputs.mixed.data(),
                      .conv_weight = weight_.data(),
                      .log_decay = inputs.log_decay.data(),
                      .beta = inputs.beta.data(),
                      .l2_normalise_qk = true};
    backend_->plan(batch);
    backend_->forward(tensors);
    return out;
  }

 private:
  std::unique_ptr<StatePool> pool_;
  std::unique_ptr<AttentionBackend> backend_;
  std::vector<float> weight_;
};

struct Request {
  Text text;  // the last token is not stored
  int32_t slot = -1, twin = -1;
  std::vector<float> outputs;  // the twin's, a row for each stored token

  int32_t stored() const { return static_cast<int32_t>(text.size()) - 1; }
};

class World {
 public:
  explicit World(uint32_t seed) : random_(seed) {
    drafts_ = make_speculation({kMaxRequests, kWidth}, {}, {}, &threads_);
  }

  void step() {
    if (cached_.size() == kCached && pick(20) == 0) evict();
    const size_t choice = pick(16);
    if (requests_.empty() || (choice < 3 && requests_.size() < kMaxRequests)) return admit();
    for (size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i].stored() + kWidth > kContext) return drop(i);
    }
    const size_t index = pick(requests_.size());
    if (choice == 3) return drop(index);
    if (choice == 4) return preempt(requests_[index]);
    speculate(choice == 5);
  }
  void drop_all() {
    while (!requests_.empty()) drop(0);
    for (const auto& [text, slot] : cached_) layer_.pool().release(slot);
    EXPECT_EQ(layer_.pool().free_slots(), layer_.pool().slots() - 1);
  }
  int64_t transactions() const { return transactions_; }
  int64_t rejected() const { return rejected_; }
  int64_t hits() const { return hits_; }

 private:
  size_t pick(size_t count) { return random_() % count; }
  static size_t width() {
    return static_cast<size_t>(layer_spec().linear.value_heads * layer_spec().linear.value_dim);
  }

  void admit() {
    Request request;
    const size_t length = 1 + pick(2 * kPage + 4);
    while (request.text.size() < length) {
      request.text.push_back(token_after(request.text, request.text.size()));
      if (pick(6) == 0) request.text.back() = static_cast<int32_t>(pick(kTokens));
    }
    request.twin = *twin_.pool().allocate();
    prefill(request);
    requests_.push_back(std::move(request));
  }

  // Computes the stored tokens, from a cached state if there is one.
  void prefill(Request& request) {
    request.slot = *layer_.pool().allocate();
    int32_t begin = 0;
    for (const auto& [text, slot] : cached_) {
      const auto length = static_cast<int32_t>(text.size());
      if (length > request.stored() || length <= begin) continue;
      if (!std::equal(text.begin(), text.end(), request.text.begin())) continue;
      layer_.pool().copy(slot, request.slot);
      begin = length;
    }
    hits_ += begin > 0;
    advance_twin(request);
    if (begin == request.stored()) return;
    Inputs inputs;
    inputs.add(request.text, begin, request.stored() - begin, request.slot);
    expect_outputs(request, begin, layer_.run(inputs.batch(), inputs), 0, request.stored() - begin);
  }

  // Lets the twin compute the stored tokens that it lacks, one by one.
  void advance_twin(Request& request) {
    while (request.outputs.size() < static_cast<size_t>(request.stored()) * width()) {
      Inputs inputs;
      const auto done = static_cast<int32_t>(request.outputs.size() / width());
      inputs.add(request.text, done, 1, request.twin);
      const std::vector<float> out = twin_.run(inputs.batch(), inputs);
      request.outputs.insert(request.outputs.end(), out.begin(), out.end());
    }
  }
  // Tokens from `begin` on have the outputs of rows from `row` on.
  void expect_outputs(const Request& request, int32_t begin, const std::vector<float>& out,
                      size_t row, int32_t count) {
    const auto from = request.outputs.begin() + begin * static_cast<int64_t>(width());
    const auto found = out.begin() + static_cast<int64_t>(row * width());
    ASSERT_TRUE(std::equal(found, found + count * static_cast<int64_t>(width()), from));
  }

  void drop(size_t index) {
    layer_.pool().release(requests_[index].slot);
    twin_.pool().release(requests_[index].twin);
    requests_.erase(requests_.begin() + static_cast<int64_t>(index));
  }

  // The request loses its slot, with the drafts that it holds, and computes its text again.
  void preempt(Request& request) {
    layer_.pool().release(request.slot);
    prefill(request);
  }

  void speculate(bool rolls_back) {
    const auto requests = static_cast<int32_t>(requests_.size());
    const auto each = static_cast<int32_t>(1 + pick(kWidth));
    const auto nodes = static_cast<size_t>(requests * each);
    std::vector<int32_t> tokens, lens, target;
    std::vector<int32_t> counts(requests_.size()), accepted_nodes(nodes), kv_lens(requests_.size());
    std::vector<int64_t> out_slots(nodes, -1);
    std::vector<int32_t> q_indptr(requests_.size() + 1);
    Inputs inputs;
    for (const Request& request : requests_) {
      Text text = request.text;
      lens.push_back(request.stored());
      for (int32_t node = 0; node < each; ++node) {
        const int32_t right = token_after(text, text.size());
        tokens.push_back(text.back());
        target.push_back(right);
        text.push_back(pick(4) == 0 ? 1 - right : right);
      }
      inputs.add(text, request.stored(), each, request.slot);
    }
    const Drafts drafts{requests, each, tokens, {}, lens};
    const DraftArrays arrays{.out_slots = out_slots, .q_indptr = q_indptr, .kv_lens = kv_lens};
    drafts_->describe(drafts, {}, {.q_indptr = q_indptr, .kv_lens = kv_lens});
    BatchView batch = draft_batch(drafts, {}, arrays);
    const std::vector<int32_t> draft_counts(requests_.size(), each);
    batch.linear = {.state_slots = inputs.slots, .draft_counts = draft_counts};
    std::vector<int32_t> snapshots(nodes, -1);
    const Snapshot snapshot = take_snapshot(each, snapshots);
    if (snapshot.slot >= 0) batch.linear.snapshot_slots = snapshots;
    const std::vector<float> out = layer_.run(batch, inputs);
    if (!rolls_back) {
      const AcceptedDrafts accepted{.counts = counts, .nodes = accepted_nodes};
      drafts_->accept(drafts, TargetTokens{target}, accepted);
      drafts_->commit(drafts, arrays, accepted, {.lens = lens});
      for (size_t i = 0; i < requests_.size(); ++i) {
        accept(requests_[i], counts[i], lens[i], &target[i * static_cast<size_t>(each)]);
        expect_outputs(requests_[i], requests_[i].stored() - counts[i], out,
                       i * static_cast<size_t>(each), counts[i]);
        rejected_ += each - counts[i];
      }
      transactions_ += requests;
    }
    keep(snapshot);
  }

  void accept(Request& request, int32_t count, int32_t length, const int32_t* target) {
    request.text.insert(request.text.end(), target, target + count);
    EXPECT_EQ(request.stored(), length);
    advance_twin(request);
  }

  struct Snapshot {
    size_t request = 0;
    int32_t slot = -1, length = 0;
  };

  // Asks for the state behind the draft that ends a page, if a request has one and there is a slot.
  Snapshot take_snapshot(int32_t each, std::vector<int32_t>& snapshots) {
    Snapshot snapshot{.request = pick(requests_.size())};
    const int32_t stored = requests_[snapshot.request].stored();
    snapshot.length = (stored / kPage + 1) * kPage;
    if (snapshot.length > stored + each || cached_.size() >= kCached) return snapshot;
    snapshot.slot = *layer_.pool().allocate();
    snapshots[snapshot.request * static_cast<size_t>(each) +
              static_cast<size_t>(snapshot.length - stored - 1)] = snapshot.slot;
    return snapshot;
  }
  // Caches a snapshot if its tokens were accepted.
  void keep(const Snapshot& snapshot) {
    if (snapshot.slot < 0) return;
    const Text& text = requests_[snapshot.request].text;
    const auto length = static_cast<size_t>(snapshot.length);
    const bool accepted = requests_[snapshot.request].stored() >= snapshot.length;
    const Text prefix(text.begin(), text.begin() + static_cast<int64_t>(accepted ? length : 0));
    if (!accepted || !cached_.emplace(prefix, snapshot.slot).second) {
      layer_.pool().release(snapshot.slot);
    }
  }
  void evict() {
    layer_.pool().release(cached_.begin()->second);
    cached_.erase(cached_.begin());
  }

  std::mt19937 random_;
  ThreadPool threads_{1};
  Layer layer_{threads_, kMaxRequests + kCached + 1, kWidth};
  Layer twin_{threads_, kMaxRequests + 1, 0};
  std::unique_ptr<Speculation> drafts_;
  std::vector<Request> requests_;
  std::map<Text, int32_t> cached_;
  int64_t transactions_ = 0, rejected_ = 0, hits_ = 0;
};

TEST(LinearTransactions, EveryAcceptedTokenHasTheBitsOfATwinWithoutDrafts) {
  World world(1);
  const int64_t wanted = 100'000 * test::test_scale();
  for (int64_t i = 0; world.transactions() < wanted && !::testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE(i);
    world.step();
  }
  EXPECT_GT(world.rejected(), wanted / 4);
  EXPECT_GT(world.hits(), wanted / 1000);
  world.drop_all();
}

}  // namespace
}  // namespace fovea
