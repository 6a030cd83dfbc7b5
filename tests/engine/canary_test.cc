// SPDX-License-Identifier: Apache-2.0
// Canaries: no tenant's attention sees a value that another tenant has stored. Each tenant writes
// and draws tokens of its own, and the values of the first layer depend on nothing but their token.
// So a backend that watches this layer knows the tenant of every value that a request may see.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/small_engine.h"
#include "fovea/engine_service.h"
#include "support/cases.h"

namespace fovea {
namespace {

constexpr int kTenants = 4;
constexpr int32_t kFirstToken = 64, kTokensOfTenant = 480;

// Used by one thread at a time: that of the engine.
struct Canaries {
  std::unordered_map<uint64_t, int> tenant_of;  // by the hash of a value
  int learning = -1;                            // the tenant whose values are new
  bool looks_elsewhere = false;                 // reads the slots of the batch's next request
  int64_t seen = 0, unknown = 0, mixed = 0;
};

class WatchingBackend final : public AttentionBackend {
 public:
  WatchingBackend(std::unique_ptr<AttentionBackend> inner, const BackendContext& context,
                  Canaries& canaries)
      : inner_(std::move(inner)),
        spec_(context.kv->spec()),
        values_(context.kv->layer(0)),
        canaries_(canaries) {}

  std::string_view name() const override { return "watching"; }
  size_t workspace_bytes(const BatchLimits& limits) const override {
    return inner_->workspace_bytes(limits);
  }
  void reserve(const BatchLimits& limits, std::span<std::byte> workspace) override {
    inner_->reserve(limits, workspace);
  }
  void plan(const BatchView& batch, Stream stream) override {
    batch_ = batch;
    inner_->plan(batch, stream);
  }
  void forward(const LayerTensors& layer, Stream stream) override {
    inner_->forward(layer, stream);
    if (layer.layer != 0) return;
    for (int32_t i = 0; i < batch_.requests; ++i) look(i);
  }

 private:
  void look(int32_t request) {
    std::set<int> tenants;
    const int32_t other = canaries_.looks_elsewhere ? (request + 1) % batch_.requests : request;
    const int32_t last = batch_.kv_lens[request];
    for (int32_t token = 0; token < last; ++token) {
      // In looks_elsewhere, the last token is the request's own.
      const int32_t from = token + 1 < last ? other : request;
      if (token >= batch_.kv_lens[from]) continue;
      const uint64_t value = hash(batch_.table.slot(batch_.request_rows[from], token));
      if (canaries_.learning >= 0) canaries_.tenant_of[value] = canaries_.learning;
      const auto found = canaries_.tenant_of.find(value);
      ++canaries_.seen;
      canaries_.unknown += found == canaries_.tenant_of.end();
      if (found != canaries_.tenant_of.end()) tenants.insert(found->second);
    }
    canaries_.mixed += tenants.size() > 1;
  }

  uint64_t hash(int64_t slot) const {
    uint64_t sum = 1469598103934665603u;
    for (int32_t head = 0; head < spec_.kv_heads; ++head) {
      const auto* row = reinterpret_cast<const unsigned char*>(v_address(values_, slot, head));
      for (size_t i = 0; i < static_cast<size_t>(spec_.head_dim_v) * sizeof(float); ++i)
        sum = (sum ^ row[i]) * 1099511628211u;
    }
    return sum;
  }

  std::unique_ptr<AttentionBackend> inner_;
  KvCacheSpec spec_;
  KvLayerView values_;
  Canaries& canaries_;
  BatchView batch_;
};

int32_t random_token(int tenant, std::mt19937& random) {
  return kFirstToken + tenant * kTokensOfTenant +
         static_cast<int32_t>(random() % static_cast<uint32_t>(kTokensOfTenant));
}

// Returns a request whose tokens, drawn ones too, are the tenant's. Prompts of a tenant share
// beginnings.
GenerateRequest request_of(int tenant, std::mt19937& random) {
  GenerateRequest request;
  std::mt19937 shared(static_cast<uint32_t>(tenant * 3) + random() % 3);
  const size_t common = random() % 100, own = 1 + random() % 60;
  for (size_t i = 0; i < common; ++i) request.tokens.push_back(random_token(tenant, shared));
  for (size_t i = 0; i < own; ++i) request.tokens.push_back(random_token(tenant, random));
  request.sampling.max_new_tokens = 1 + static_cast<int32_t>(random() % 24);
  request.sampling.ignore_eos = true;
  for (int32_t i = 0; i < kTokensOfTenant; ++i)
    request.sampling.logit_bias.push_back({kFirstToken + tenant * kTokensOfTenant + i, 100});
  if (random() % 2 == 0) request.salt = "tenant " + std::to_string(tenant);
  return request;
}

class CanaryTest : public ::testing::Test {
 protected:
  CanaryTest() : registry_(BackendRegistry::builtin()) {
    BackendEntry entry = *registry_.find("cpu");
    entry.name = "watching";
    entry.aliases.clear();
    entry.create = [this, create = entry.create](const BackendContext& context) {
      return std::make_unique<WatchingBackend>(create(context), context, canaries_);
    };
    registry_.add(entry);
  }

  // An engine whose pool holds little more than two requests, and which knows every token.
  std::unique_ptr<Engine> engine() {
    EngineOptions options = small_options();
    options.registry = &registry_;
    options.backend = parse_backend_wish("watching");
    options.batch_invariant = true;  // a token's value does not depend on its batch
    options.kv_memory_bytes = size_t{1200} << 10;
    std::unique_ptr<Engine> engine = Engine::load(options);
    for (canaries_.learning = 0; canaries_.learning < kTenants; ++canaries_.learning) {
      for (int32_t first = 0; first < kTokensOfTenant; first += 160) {
        GenerateRequest request;
        for (int32_t i = 0; i < 160; ++i)
          request.tokens.push_back(kFirstToken + canaries_.learning * kTokensOfTenant + first + i);
        request.sampling.max_new_tokens = 1;
        (void)engine->generate({&request, 1});
      }
    }
    canaries_.learning = -1;
    EXPECT_EQ(canaries_.tenant_of.size(), static_cast<size_t>(kTenants * kTokensOfTenant));
    canaries_.seen = 0;
    engine->clear_prefix_cache();
    return engine;
  }

  Canaries canaries_;
  BackendRegistry registry_;
};

// Threads of all tenants add requests and cancel many of them in any state.
TEST_F(CanaryTest, NoTenantSeesAnothersValues) {
  EngineService service(engine(), {.max_running = 4});
  std::atomic<int64_t> cancelled = 0, finished = 0, wrong_tokens = 0;
  std::vector<std::thread> threads;
  for (int tenant = 0; tenant < kTenants; ++tenant) {
    threads.emplace_back([&, tenant] {
      std::mt19937 random(static_cast<uint32_t>(tenant));
      for (int i = 0; i < 40 * test::test_scale(); ++i) {
        std::vector<ServiceRequest> batch(1 + random() % 3);
        for (ServiceRequest& one : batch) {
          one.request = request_of(tenant, random);
          one.on_event = [&, tenant](const TokenEvent& event) {
            const int32_t place = event.token - kFirstToken - tenant * kTokensOfTenant;
            if (event.token >= 0 && (place < 0 || place >= kTokensOfTenant)) ++wrong_tokens;
            finished += event.finish == FinishReason::length;
            cancelled += event.finish == FinishReason::cancelled;
          };
        }
        const std::vector<int64_t> ids = service.add(std::move(batch));
        std::this_thread::sleep_for(std::chrono::milliseconds(random() % 8));
        if (random() % 2 == 0) service.cancel(ids);
        while (service.stats().waiting > 16) std::this_thread::yield();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(service.wait_idle(std::chrono::minutes(5)));
  EXPECT_EQ(canaries_.mixed, 0);
  EXPECT_EQ(canaries_.unknown, 0);
  EXPECT_EQ(wrong_tokens, 0);
  EXPECT_GT(canaries_.seen, 1000);
  EXPECT_GT(finished, 0);
  EXPECT_GT(cancelled, 0);
  const ServiceStats stats = service.stats();
  EXPECT_GT(stats.engine.prefix_hits, 0);
  RecordProperty("values", std::to_string(canaries_.seen));
  std::printf("%lld values seen, %lld requests finished, %lld cancelled, %lld preempted\n",
              static_cast<long long>(canaries_.seen), static_cast<long long>(finished),
              static_cast<long long>(cancelled), static_cast<long long>(stats.engine.preemptions));
}

// The backend would notice it.
TEST_F(CanaryTest, ValuesOfTheNextRequestAreNoticed) {
  const std::unique_ptr<Engine> engine = this->engine();
  canaries_.looks_elsewhere = true;
  std::mt19937 random(1);
  const std::vector<GenerateRequest> requests = {request_of(0, random), request_of(1, random)};
  (void)engine->generate(requests);
  EXPECT_GT(canaries_.mixed, 0);
}

}  // namespace
}  // namespace fovea
