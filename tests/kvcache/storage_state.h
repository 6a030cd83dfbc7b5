// SPDX-License-Identifier: Apache-2.0
// Requests in a request table, a page allocator, a prefix cache and a state pool, together with the
// naive model of a prefix cache, and the checks that hold at any time.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fovea/kv_cache.h"
#include "fovea/prefix_cache.h"
#include "kvcache/prefix_model.h"

namespace fovea::test {

using Tokens = PrefixModel::Tokens;

struct Config {
  int32_t page_size;
  int64_t pages;   // few: most steps exhaust the pool
  bool has_state;  // linear layers: a match ends at a snapshot
};

constexpr int32_t kMaxContext = 64;
constexpr int32_t kMaxRequests = 7;
constexpr int32_t kStates = 12;
constexpr int kTenants = 2;

struct Request {
  int32_t row = 0;
  int32_t state = -1;
  int tenant = 0;
  Tokens tokens;       // the whole prompt, then the decoded tokens
  int32_t length = 0;  // tokens stored
};

class StorageState {
 public:
  StorageState(const Config& config, uint32_t seed)
      : config_(config),
        random_(seed),
        table_(kMaxRequests, kMaxContext),
        pages_(config_.pages, config.page_size),
        states_(make_state_pool(state_spec(), kStates)),
        cache_(std::make_unique<PrefixCache>(pages_, config.has_state ? states_.get() : nullptr)),
        model_(config.page_size, config.has_state),
        content_(static_cast<size_t>(config_.pages * config.page_size)) {}

  // Returns how often each event had an effect.
  const std::map<std::string, int64_t>& events() const { return events_; }

 protected:
  static StateCacheSpec state_spec() {
    StateCacheSpec spec;
    spec.layers = spec.conv_dim = spec.heads = spec.rows = spec.columns = 1;
    spec.conv_width = 2;
    return spec;
  }
  uint32_t draw(size_t below) { return static_cast<uint32_t>(random_() % below); }
  void count(const char* event) { ++events_[event]; }
  static PrefixDomain domain(int tenant) {
    return {.model = "m", .salt = tenant == 0 ? "red" : "blue"};
  }

  // Identifies the first `length` tokens of a request.
  static uint32_t prefix_hash(const Request& request, int32_t length) {
    uint32_t hash = 2166136261u + static_cast<uint32_t>(request.tenant);
    for (int32_t i = 0; i < length; ++i) {
      hash = (hash ^ static_cast<uint32_t>(request.tokens[i])) * 16777619u;
    }
    return hash;
  }
  float& state_content(int32_t slot) { return states_->layer(0).state_as<float>()[slot]; }

  std::vector<int64_t> pages_of(const Request& request) {
    std::vector<int64_t> pages;
    const auto row = table_.row(request.row);
    for (int32_t i = 0; i < request.length; i += config_.page_size) {
      pages.push_back(row[i] / config_.page_size);
    }
    return pages;
  }
  Tokens stored_tokens(const Request& request) const {
    return {request.tokens.begin(), request.tokens.begin() + request.length};
  }

  // Few distinct tokens, so that prefixes often match.
  Tokens random_tokens(size_t count) {
    Tokens tokens(count);
    for (int32_t& token : tokens) token = draw(8) == 0;
    return tokens;
  }

  // Often the beginning of an earlier conversation, followed by new tokens.
  Tokens prompt() {
    Tokens tokens;
    if (!history_.empty() && draw(4) > 0) {
      tokens = history_[draw(history_.size())];
      tokens.resize(draw(tokens.size() + 1));
    }
    const Tokens rest = random_tokens(1 + draw(kMaxContext / 3));
    tokens.insert(tokens.end(), rest.begin(), rest.end());
    tokens.resize(std::min<size_t>(tokens.size(), kMaxContext));
    return tokens;
  }

  // Returns a state slot, restored from a snapshot if necessary. The tree must not own the caller's
  // snapshot.
  std::optional<int32_t> new_state() {
    auto slot = states_->allocate();
    if (slot) return slot;
    evict_state();
    return states_->allocate();
  }

  // Stores the next tokens of a request up to `length`. Returns false if they do not fit even after
  // eviction.
  bool grow(Request& request, int32_t length) {
    const auto row = table_.row(request.row);
    std::vector<int64_t> slots;
    const int64_t last = request.length > 0 ? row[request.length - 1] : -1;
    while (!pages_.extend(request.length, length, last, slots)) {
      EXPECT_TRUE(slots.empty());
      if (check_evict(1 + draw(4)) == 0) return false;
      count("retry");
    }
    EXPECT_EQ(slots.size(), static_cast<size_t>(length - request.length));
    for (const int64_t slot : slots) {
      const int32_t position = request.length++;
      EXPECT_EQ(slot % config_.page_size, position % config_.page_size);
      EXPECT_EQ(pages_.references(slot / config_.page_size), 1) << "writes a shared page";
      row[position] = static_cast<int32_t>(slot);
      content_[slot] = prefix_hash(request, position + 1);
    }
    if (request.state >= 0) set_state(request);
    return true;
  }
  void set_state(const Request& request) {
    state_content(request.state) = std::bit_cast<float>(prefix_hash(request, request.length));
  }

  void offer(const Request& request, int32_t state) {
    const auto pages = pages_of(request);
    cache_->insert(domain(request.tenant), stored_tokens(request), pages, state);
    model_.insert(request.tenant, stored_tokens(request), pages, state);
  }

  void evict_state() {
    if (!config_.has_state) return;
    const bool expected = model_.evict_state();
    EXPECT_EQ(cache_->evict_state(), expected);
    if (expected) count("evict_state");
  }
  int64_t check_evict(int64_t count) {
    const std::vector<int32_t> owners = owners_by_requests();
    const auto expected = model_.evict(count, [&](int64_t page) { return owners[page]; });
    EXPECT_EQ(cache_->evict(count), expected);
    return static_cast<int64_t>(expected.size());
  }

  Request* pick() { return requests_.empty() ? nullptr : &requests_[draw(requests_.size())]; }
  static bool decoding(const Request& request) {
    return request.length == static_cast<int32_t>(request.tokens.size());
  }

  void end(size_t index) {
    const Request& request = requests_[index];
    check_content(request);
    history_.resize(std::min<size_t>(history_.size() + 1, 6));
    history_[draw(history_.size())] = request.tokens;
    const auto row = table_.row(request.row);
    pages_.release_slots(row.first(static_cast<size_t>(request.length)));
    table_.release(request.row);
    if (request.state >= 0) states_->release(request.state);
    requests_.erase(requests_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  void check_content(const Request& request) {
    const auto row = table_.row(request.row);
    for (int32_t i = 0; i < request.length; ++i) {
      ASSERT_EQ(content_[row[i]], prefix_hash(request, i + 1)) << "token " << i;
    }
    for (int32_t i = request.length; i < kMaxContext; ++i) ASSERT_EQ(row[i], 0);
    if (request.state < 0 || request.length == 0) return;
    ASSERT_EQ(std::bit_cast<uint32_t>(state_content(request.state)),
              prefix_hash(request, request.length));
  }

  std::vector<int32_t> owners_by_requests() {
    std::vector<int32_t> owners(config_.pages);
    for (const Request& request : requests_) {
      for (const int64_t page : pages_of(request)) ++owners[page];
    }
    return owners;
  }

  void check_owners() {
    std::vector<int32_t> owners = owners_by_requests();
    std::vector<int32_t> state_owners(kStates);
    for (const Request& request : requests_) {
      if (request.state >= 0) ++state_owners[request.state];
    }
    int64_t snapshots = 0;
    for (const auto& [path, node] : model_.nodes()) {
      ++owners[node.page];
      if (node.state < 0) continue;
      ++state_owners[node.state];
      ++snapshots;
    }
    int64_t used = 0;
    for (int64_t page = 0; page < config_.pages; ++page) {
      ASSERT_EQ(pages_.references(page), owners[page]) << "page " << page;
      used += owners[page] > 0;
    }
    ASSERT_EQ(owners[0], 0) << "page 0 was handed out";
    ASSERT_EQ(pages_.free_pages() + used, config_.pages - 1);
    ASSERT_EQ(state_owners[0], 0);
    ASSERT_LE(*std::ranges::max_element(state_owners), 1);
    ASSERT_EQ(states_->free_slots() + std::ranges::count(state_owners, 1), kStates - 1);
    ASSERT_EQ(cache_->stats().pages, static_cast<int64_t>(model_.nodes().size()));
    ASSERT_EQ(cache_->stats().snapshots, snapshots);
  }

  Config config_;
  std::mt19937 random_;
  RequestTable table_;
  PageAllocator pages_;
  std::unique_ptr<StatePool> states_;
  std::unique_ptr<PrefixCache> cache_;
  PrefixModel model_;
  std::vector<Request> requests_;
  std::vector<Tokens> history_;
  std::vector<std::pair<int, Tokens>> pins_;
  std::vector<uint32_t> content_;  // [slots] hash of the prefix that ends in the slot
  std::map<std::string, int64_t> events_;
};

}  // namespace fovea::test
