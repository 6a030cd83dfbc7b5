// SPDX-License-Identifier: Apache-2.0
// Random transactions over storage on the CPU: drafts are accepted, rejected and rolled back while
// requests come, share cached prefixes, and go. A naive model knows every row: it is a hash of the
// request's text up to the token, and so is a state. After each step every row that a request owns
// must be that of its text.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "fovea/prefix_cache.h"
#include "fovea/speculation.h"
#include "support/cases.h"

namespace fovea {
namespace {

constexpr int32_t kWindow = 9, kContext = 80, kMaxRequests = 6, kMaxWidth = 8;
constexpr int32_t kTokens = 3;  // few, so that drafts are often right

enum class Extras { prefix_cache, window_and_states };

uint32_t hash_of(const std::vector<int32_t>& text, size_t length) {
  uint32_t hash = 2166136261u;
  for (size_t i = 0; i < length; ++i) hash = (hash ^ static_cast<uint32_t>(text[i])) * 16777619u;
  return hash;
}

struct Request {
  int32_t row = 0;
  std::vector<int32_t> text;  // the last token is not stored
  int32_t state = -1;
  std::vector<int32_t> snapshots;  // kMaxWidth slots

  int32_t stored() const { return static_cast<int32_t>(text.size()) - 1; }
};

class World {
 public:
  World(int32_t page_size, Extras extras, uint32_t seed)
      : random_(seed), extras_(extras), page_size_(page_size) {
    KvCacheSpec spec{.layers = 2, .kv_heads = 2, .head_dim = 4, .head_dim_v = 2};
    spec.page_size = page_size;
    const int64_t pages = 160 / page_size + 1;
    pages_ = std::make_unique<PageAllocator>(pages, page_size);
    full_ = make_kv_pool(spec, pages);
    pools_ = {full_.get()};
    if (extras == Extras::prefix_cache) {
      cache_ = std::make_unique<PrefixCache>(*pages_, nullptr);
    } else {
      spec.window = kWindow;
      window_ = make_window_kv_pool(spec, pages, pages * page_size);
      pools_.push_back(window_.get());
      states_ = make_state_pool({.layers = 1, .conv_width = 1, .heads = 1, .rows = 1, .columns = 2},
                                kMaxRequests * (kMaxWidth + 1) + 1);
    }
    drafts_ = make_speculation({kMaxRequests, kMaxWidth}, pools_, {}, &threads_);
  }

  void step() {
    const size_t choice = pick(10);
    if (requests_.empty() || (choice == 0 && requests_.size() < kMaxRequests)) return admit();
    if (choice == 1) return drop(pick(requests_.size()), true);  // finished
    if (choice == 2) return drop(pick(requests_.size()), false);
    speculate(choice == 3);
  }

  void check() const {
    for (const Request& request : requests_) check_request(request);
  }
  void drop_all() {
    while (!requests_.empty()) drop(0, false);
    if (cache_) cache_->clear();
    EXPECT_EQ(pages_->free_pages(), pages_->pages() - 1);
    if (window_) {
      EXPECT_EQ(window_->free_pages(), window_->pages() - 1);
      EXPECT_EQ(states_->free_slots(), states_->slots() - 1);
    }
  }
  int64_t moved() const { return moved_; }
  int64_t hits() const { return hits_; }

 private:
  size_t pick(size_t count) { return random_() % count; }
  int32_t slot(const Request& request, int32_t token) {
    return table_.row(request.row)[static_cast<size_t>(token)];
  }
  std::span<int32_t> slots(const Request& request, int32_t begin, int32_t end) {
    return table_.row(request.row)
        .subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
  }

  // Stores a row, as forward() does, in every layer of every pool.
  void write(int64_t full_slot, uint32_t hash) {
    for (KvPool* pool : pools_) {
      const int64_t at =
          pool->slot_map().empty() ? full_slot : pool->slot_map()[static_cast<size_t>(full_slot)];
      ASSERT_GT(at, 0);
      for (int32_t layer = 0; layer < 2; ++layer) {
        for (int32_t head = 0; head < 2; ++head) {
          const uint32_t value = hash + static_cast<uint32_t>(layer * 2 + head);
          std::vector<uint32_t> row(4, value);
          std::memcpy(k_address(pool->layer(layer), at, head), row.data(), 16);
          std::memcpy(v_address(pool->layer(layer), at, head), row.data(), 8);
        }
      }
    }
  }
  bool holds(const KvPool& pool, int64_t at, uint32_t hash) const {
    bool equal = true;
    for (int32_t layer = 0; layer < 2; ++layer) {
      for (int32_t head = 0; head < 2; ++head) {
        const std::vector<uint32_t> row(4, hash + static_cast<uint32_t>(layer * 2 + head));
        equal &= std::memcmp(k_address(pool.layer(layer), at, head), row.data(), 16) == 0;
        equal &= std::memcmp(v_address(pool.layer(layer), at, head), row.data(), 8) == 0;
      }
    }
    return equal;
  }
  float& state(int32_t slot) const {
    const StateLayerView layer = states_->layer(0);
    return layer.state_as<float>()[slot * layer.state_slot_stride];
  }

  void check_request(const Request& request) const {
    for (int32_t token = 0; token < request.stored(); ++token) {
      const int32_t at = table_.table().entry(request.row, token);
      const uint32_t hash = hash_of(request.text, static_cast<size_t>(token) + 1);
      ASSERT_GT(pages_->references(at / page_size_), 0) << token;
      ASSERT_TRUE(holds(*full_, at, hash)) << "token " << token << " of " << request.stored();
      if (!window_ || token <= request.stored() - kWindow) continue;
      const int64_t here = window_->slot_map()[static_cast<size_t>(at)];
      ASSERT_GT(here, 0) << token;
      ASSERT_TRUE(holds(*window_, here, hash)) << "token " << token << " of the window";
    }
    if (!states_) return;
    uint32_t bits = 0;
    std::memcpy(&bits, &state(request.state), sizeof(bits));
    ASSERT_EQ(bits, hash_of(request.text, static_cast<size_t>(request.stored())));
  }
  void set_state(int32_t slot, uint32_t hash) const { std::memcpy(&state(slot), &hash, 4); }

  // Takes slots for tokens up to `length`; false: there is no room.
  bool extend(const Request& request, int32_t begin, int32_t length) {
    std::vector<int64_t> fresh;
    const int64_t last = begin == 0 ? -1 : slot(request, begin - 1);
    while (!pages_->extend(begin, length, last, fresh)) {
      if (!cache_ || cache_->evict(4).empty()) return false;
    }
    if (window_ && !window_->map(fresh)) {
      for (size_t i = 0; i < fresh.size(); ++i) {
        slots(request, begin, length)[i] = static_cast<int32_t>(fresh[i]);
      }
      pages_->truncate(slots(request, 0, length), begin);
      return false;
    }
    for (size_t i = 0; i < fresh.size(); ++i) {
      slots(request, begin, length)[i] = static_cast<int32_t>(fresh[i]);
    }
    return true;
  }
  // Frees all but the first `keep` of `length` tokens.
  void shorten(const Request& request, int32_t length, int32_t keep) {
    if (window_) {
      window_->unmap(slots(request, keep, length));
      window_->unmap(slots(request, 0, std::max(keep - kWindow, 0)));
    }
    pages_->truncate(slots(request, 0, length), keep);
  }

  void admit() {
    Request request;
    request.row = table_.allocate().value();
    const size_t length = 2 + pick(30);
    for (size_t i = 0; i < length; ++i) {
      request.text.push_back(i % 7 == 6 ? static_cast<int32_t>(pick(kTokens)) : 1);
    }
    int32_t cached = 0;
    if (cache_) {
      const PrefixMatch match = cache_->match({}, request.text, request.stored());
      cached = match.tokens;
      hits_ += cached > 0;
      for (int32_t token = 0; token < cached; ++token) {
        slots(request, token, token + 1)[0] =
            static_cast<int32_t>(match.pages[static_cast<size_t>(token / page_size_)]) *
                page_size_ +
            token % page_size_;
      }
    }
    if (!extend(request, cached, request.stored())) {
      if (cached > 0) pages_->release_slots(slots(request, 0, cached));
      return table_.release(request.row);
    }
    for (int32_t token = cached; token < request.stored(); ++token) {
      write(slot(request, token), hash_of(request.text, static_cast<size_t>(token) + 1));
    }
    shorten(request, request.stored(), request.stored());
    if (states_) {
      request.state = states_->allocate().value();
      for (int32_t i = 0; i < kMaxWidth; ++i) {
        request.snapshots.push_back(states_->allocate().value());
      }
      set_state(request.state, hash_of(request.text, static_cast<size_t>(request.stored())));
    }
    requests_.push_back(std::move(request));
  }

  // Releases everything that a request owns; its full pages may stay in the cache.
  void drop(size_t index, bool keep) {
    Request& request = requests_[index];
    const int32_t stored = request.stored();
    if (cache_ && keep && stored >= page_size_) {
      std::vector<int64_t> full;
      for (int32_t token = 0; token + page_size_ <= stored; token += page_size_) {
        full.push_back(slot(request, token) / page_size_);
      }
      cache_->insert(
          {}, std::span(request.text).first(full.size() * static_cast<size_t>(page_size_)), full);
    }
    if (window_) window_->unmap(slots(request, 0, stored));
    pages_->release_slots(slots(request, 0, stored));
    if (states_) {
      states_->release(request.state);
      for (const int32_t slot : request.snapshots) states_->release(slot);
    }
    table_.release(request.row);
    requests_.erase(requests_.begin() + static_cast<int64_t>(index));
  }

  // One step of some requests with drafts of one width: verified, then accepted or given up.
  void speculate(bool gives_up) {
    const int32_t width = 1 + static_cast<int32_t>(pick(kMaxWidth));
    std::vector<size_t> batch;
    for (size_t i = 0; i < requests_.size(); ++i) {
      const Request& request = requests_[i];
      if (random_() % 2 == 0 || request.stored() + width > kContext) continue;
      if (extend(request, request.stored(), request.stored() + width)) batch.push_back(i);
    }
    const auto count = static_cast<int32_t>(batch.size());
    const auto nodes = static_cast<size_t>(count * width);
    std::vector<int32_t> tokens(nodes), parents(nodes, -1), lens, rows, target(nodes);
    for (int32_t i = 0; i < count; ++i) {
      const Request& request = requests_[batch[static_cast<size_t>(i)]];
      lens.push_back(request.stored());
      rows.push_back(request.row);
      for (int32_t node = 0; node < width; ++node) {
        const auto at = static_cast<size_t>(i * width + node);
        tokens[at] = node == 0 ? request.text.back() : static_cast<int32_t>(pick(kTokens));
        target[at] = static_cast<int32_t>(pick(kTokens));
        // States follow chains.
        const size_t reach = states_ ? 1 : std::min<size_t>(static_cast<size_t>(node), 3);
        if (node > 0) parents[at] = node - 1 - static_cast<int32_t>(pick(reach));
      }
    }
    const Drafts drafts{count, width, tokens, parents, lens};
    const DraftPlaces places{table_.table(), rows};
    std::vector<int64_t> out_slots(nodes);
    std::vector<int32_t> kv_lens(lens.size());
    const DraftArrays arrays{.out_slots = out_slots, .kv_lens = kv_lens};
    drafts_->describe(drafts, places, arrays);
    verify(drafts, batch, out_slots);
    std::vector<int32_t> counts(lens.size()), accepted(nodes), text(nodes);
    if (!gives_up) commit(drafts, arrays, batch, {counts, accepted, text}, target);
    for (int32_t i = 0; i < count; ++i) {
      Request& request = requests_[batch[static_cast<size_t>(i)]];
      const int32_t before = request.stored(), kept = counts[static_cast<size_t>(i)];
      const auto first = text.begin() + i * width;
      request.text.insert(request.text.end(), first, first + kept);
      EXPECT_EQ(request.stored(), before + kept);
      shorten(request, before + width, before + kept);
    }
  }

  // Stores the rows and states that a pass over the drafts computes.
  void verify(const Drafts& drafts, const std::vector<size_t>& batch,
              const std::vector<int64_t>& out_slots) {
    for (int32_t i = 0; i < drafts.requests; ++i) {
      const Request& request = requests_[batch[static_cast<size_t>(i)]];
      std::vector<std::vector<int32_t>> texts;  // up to each node
      for (int32_t node = 0; node < drafts.width; ++node) {
        const auto at = static_cast<size_t>(i * drafts.width + node);
        std::vector<int32_t> text = request.text;
        if (node > 0) {
          text = texts[static_cast<size_t>(drafts.parents[at])];
          text.push_back(drafts.tokens[at]);
        }
        write(out_slots[at], hash_of(text, text.size()));
        if (states_) {
          set_state(request.snapshots[static_cast<size_t>(node)], hash_of(text, text.size()));
        }
        texts.push_back(std::move(text));
      }
    }
  }

  void commit(const Drafts& drafts, const DraftArrays& arrays, const std::vector<size_t>& batch,
              const AcceptedDrafts& accepted, const std::vector<int32_t>& target) {
    drafts_->accept(drafts, TargetTokens{target}, accepted);
    std::vector<int32_t> lens(drafts.lens.begin(), drafts.lens.end()), states, snapshots;
    for (const size_t index : batch) {
      if (!states_) continue;
      const Request& request = requests_[index];
      states.push_back(request.state);
      snapshots.insert(snapshots.end(), request.snapshots.begin(),
                       request.snapshots.begin() + drafts.width);
    }
    drafts_->commit(drafts, arrays, accepted, {lens, states, snapshots});
    for (int32_t i = 0; i < drafts.requests; ++i) {
      Request& request = requests_[batch[static_cast<size_t>(i)]];
      const int32_t count = accepted.counts[static_cast<size_t>(i)];
      EXPECT_EQ(lens[static_cast<size_t>(i)], request.stored() + count);
      moved_ += accepted.nodes[static_cast<size_t>(i * drafts.width + count - 1)] >= count;
      if (!states_) continue;
      request.state = states[static_cast<size_t>(i)];
      std::copy_n(snapshots.begin() + i * drafts.width, drafts.width, request.snapshots.begin());
    }
  }

  std::mt19937 random_;
  Extras extras_;
  int32_t page_size_;
  ThreadPool threads_{1};
  RequestTable table_{kMaxRequests + 2, kContext + kMaxWidth};
  std::unique_ptr<PageAllocator> pages_;
  std::unique_ptr<KvPool> full_;
  std::unique_ptr<WindowKvPool> window_;
  std::unique_ptr<StatePool> states_;
  std::unique_ptr<PrefixCache> cache_;
  std::vector<KvPool*> pools_;
  std::unique_ptr<Speculation> drafts_;
  std::vector<Request> requests_;
  int64_t moved_ = 0, hits_ = 0;
};

TEST(Transactions, EveryRowIsThatOfItsText) {
  for (const Extras extras : {Extras::prefix_cache, Extras::window_and_states}) {
    for (const int32_t page_size : {1, 4, 16}) {
      SCOPED_TRACE("page " + std::to_string(page_size));
      World world(page_size, extras, static_cast<uint32_t>(page_size));
      const int64_t steps = 2500 * test::test_scale();
      for (int64_t i = 0; i < steps && !::testing::Test::HasFailure(); ++i) {
        SCOPED_TRACE("step " + std::to_string(i));
        world.step();
        world.check();
      }
      if (extras == Extras::prefix_cache) {
        EXPECT_GT(world.moved(), steps / 20);
        EXPECT_GT(world.hits(), steps / 100);
      }
      world.drop_all();
    }
  }
}

}  // namespace
}  // namespace fovea
