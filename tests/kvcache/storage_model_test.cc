// SPDX-License-Identifier: Apache-2.0
// A small scheduler drives request table, page allocator, prefix cache and state pool at random.
// After every step the test counts the owners of every page and state slot from scratch, and every
// slot that a request can read must hold what the request's own tokens stored there.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <string>

#include "kvcache/storage_state.h"
#include "support/cases.h"

namespace fovea::test {
namespace {

class StorageMachine : public StorageState {
 public:
  using StorageState::StorageState;

  void step() {
    using Event = void (StorageMachine::*)();
    static constexpr Event kEvents[] = {
        &StorageMachine::admit,         &StorageMachine::admit,
        &StorageMachine::prefill_chunk, &StorageMachine::prefill_chunk,
        &StorageMachine::prefill_chunk, &StorageMachine::decode,
        &StorageMachine::decode,        &StorageMachine::decode,
        &StorageMachine::speculate,     &StorageMachine::fork,
        &StorageMachine::cancel,        &StorageMachine::retract,
        &StorageMachine::snapshot,      &StorageMachine::evict,
        &StorageMachine::evict_state,   &StorageMachine::pin,
        &StorageMachine::unpin,
    };
    (this->*kEvents[draw(std::size(kEvents))])();
    check_owners();
  }

  // Ends all requests: nothing may remain.
  void finish() {
    while (!requests_.empty()) end(0);
    while (!pins_.empty()) unpin();
    check_evict(config_.pages);
    check_owners();
    EXPECT_EQ(pages_.free_pages(), config_.pages - 1);
    EXPECT_EQ(states_->free_slots(), kStates - 1);
    EXPECT_EQ(table_.available(), kMaxRequests - 1);
    EXPECT_EQ(cache_->stats().pages, 0);
  }

 private:
  void admit() {
    const auto row = table_.allocate();
    if (!row) return;
    Request request{.row = *row, .tenant = static_cast<int>(draw(kTenants))};
    request.tokens = prompt();
    if (config_.has_state) {
      const auto slot = new_state();
      if (!slot) return table_.release(*row);
      request.state = *slot;
    }
    const auto limit = static_cast<int32_t>(request.tokens.size()) - 1;
    const PrefixMatch match = cache_->match(domain(request.tenant), request.tokens, limit);
    const auto [expected, state] = model_.match(request.tenant, request.tokens, limit);
    EXPECT_EQ(match.pages, expected);
    EXPECT_EQ(match.state_slot, config_.has_state ? state : -1);
    if (match.state_slot >= 0) states_->copy(match.state_slot, request.state);
    request.length = match.tokens;
    const auto slots = table_.row(request.row);
    for (int32_t i = 0; i < match.tokens; ++i) {
      slots[i] = static_cast<int32_t>(match.pages[i / config_.page_size]) * config_.page_size +
                 i % config_.page_size;
    }
    if (match.tokens > 0) count("hit");
    requests_.push_back(request);
    check_content(requests_.back());
  }

  void prefill_chunk() {
    Request* request = pick();
    if (!request) return;
    const auto left = static_cast<int32_t>(request->tokens.size()) - request->length;
    if (left == 0) return;
    int32_t to = request->length + 1 + static_cast<int32_t>(draw(left));
    // Snapshots are taken at page ends, so some passes stop there.
    const int32_t page_end = to / config_.page_size * config_.page_size;
    if (config_.has_state && page_end > request->length && draw(4) > 0) to = page_end;
    if (!grow(*request, to)) return retract_one(*request);
    offer(*request, -1);
    take_snapshot(*request);
    count("prefill");
  }

  void decode() {
    Request* request = pick();
    if (!request || !decoding(*request) || request->length == kMaxContext) return;
    request->tokens.push_back(draw(2));
    if (grow(*request, request->length + 1)) return count("decode");
    request->tokens.pop_back();
    retract_one(*request);
  }

  void speculate() {
    Request* request = pick();
    if (!request || !decoding(*request)) return;
    const int32_t before = request->length;
    const auto drafts = static_cast<int32_t>(
        std::min<size_t>(1 + draw(6), static_cast<size_t>(kMaxContext - before)));
    const Tokens tokens = random_tokens(static_cast<size_t>(drafts));
    request->tokens.insert(request->tokens.end(), tokens.begin(), tokens.end());
    if (!grow(*request, before + drafts)) {
      request->tokens.resize(static_cast<size_t>(before));
      return;
    }
    const int32_t kept = before + static_cast<int32_t>(draw(static_cast<size_t>(drafts) + 1));
    const auto row = table_.row(request->row);
    pages_.truncate(row.first(static_cast<size_t>(request->length)), kept);
    std::ranges::fill(row.subspan(static_cast<size_t>(kept)), 0);
    request->tokens.resize(static_cast<size_t>(kept));
    request->length = kept;
    if (request->state >= 0) set_state(*request);
    count("speculate");
  }

  // Shares the full pages and copies the tail, as parallel sampling does.
  void fork() {
    Request* parent = pick();
    if (!parent || parent->length == 0 || table_.available() == 0) return;
    const int32_t shared = parent->length / config_.page_size * config_.page_size;
    Request child = *parent;
    child.length = shared;
    child.row = table_.allocate().value();
    if (config_.has_state) {
      const auto slot = new_state();
      if (!slot) return table_.release(child.row);
      child.state = *slot;
    }
    const auto row = table_.row(child.row);
    std::ranges::copy(table_.row(parent->row).first(static_cast<size_t>(shared)), row.begin());
    for (const int64_t page : pages_of(child)) pages_.retain(page);
    if (child.state >= 0) set_state(child);
    const int32_t length = parent->length;
    requests_.push_back(child);
    if (!grow(requests_.back(), length)) return end(requests_.size() - 1);
    check_content(requests_.back());
    count("fork");
  }

  void cancel() {
    if (requests_.empty()) return;
    end(draw(requests_.size()));
    count("cancel");
  }
  void retract() {
    if (Request* request = pick()) retract_one(*request);
  }
  void retract_one(Request& request) {
    offer(request, -1);
    end(static_cast<size_t>(&request - requests_.data()));
    count("retract");
  }

  void snapshot() {
    if (Request* request = pick()) take_snapshot(*request);
  }
  void take_snapshot(const Request& request) {
    if (!config_.has_state || request.length == 0 || request.length % config_.page_size != 0) {
      return;
    }
    const auto slot = new_state();
    if (!slot) return;
    states_->copy(request.state, *slot);
    offer(request, *slot);
    count("snapshot");
  }

  void evict() {
    if (check_evict(1 + draw(12)) > 0) count("evict");
  }
  void pin() {
    Request* request = pick();
    if (!request || pins_.size() >= 3) return;
    const int32_t tokens = cache_->pin(domain(request->tenant), request->tokens);
    EXPECT_EQ(tokens, model_.pin(request->tenant, request->tokens));
    if (tokens == 0) return;
    pins_.emplace_back(request->tenant, request->tokens);
    count("pin");
  }
  void unpin() {
    if (pins_.empty()) return;
    const auto [tenant, tokens] = pins_.front();
    pins_.erase(pins_.begin());
    EXPECT_TRUE(model_.unpin(tenant, tokens));
    cache_->unpin(domain(tenant), tokens);
  }
};

class StorageModel : public testing::TestWithParam<Config> {};

TEST_P(StorageModel, AgreesWithTheNaiveModel) {
  // 10^6 steps over the six configurations at scale 1.
  constexpr int kSteps = 170000;
  constexpr int kStepsPerLife = 1700;
  std::map<std::string, int64_t> events;
  for (int life = 0; life < kSteps / kStepsPerLife * test::test_scale(); ++life) {
    SCOPED_TRACE(testing::Message() << "seed " << life);
    StorageMachine machine(GetParam(), static_cast<uint32_t>(life));
    for (int i = 0; i < kStepsPerLife && !HasFailure(); ++i) machine.step();
    if (!HasFailure()) machine.finish();
    if (HasFailure()) return;
    for (const auto& [event, times] : machine.events()) events[event] += times;
  }
  // A run without one of these events proves little.
  for (const char* event : {"hit", "retry", "prefill", "decode", "speculate", "fork", "cancel",
                            "retract", "evict", "pin"}) {
    EXPECT_GT(events[event], 50) << event;
  }
  if (GetParam().has_state) {
    EXPECT_GT(events["snapshot"], 50);
    EXPECT_GT(events["evict_state"], 50);
  }
}

INSTANTIATE_TEST_SUITE_P(Configurations, StorageModel,
                         testing::Values(Config{1, 64, false}, Config{1, 64, true},
                                         Config{4, 24, false}, Config{4, 24, true},
                                         Config{5, 20, false}, Config{16, 10, true}),
                         [](const auto& instance) {
                           return "page_" + std::to_string(instance.param.page_size) +
                                  (instance.param.has_state ? "_with_state" : "");
                         });

}  // namespace
}  // namespace fovea::test
