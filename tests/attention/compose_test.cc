// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "fovea/select_backend.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

// Records its calls.
class Recorder : public AttentionBackend {
 public:
  Recorder(std::string name, size_t bytes, std::vector<std::string>& log)
      : name_(std::move(name)), bytes_(bytes), log_(log) {}

  std::string_view name() const override { return name_; }
  size_t workspace_bytes(const BatchLimits&) const override { return bytes_; }
  void reserve(const BatchLimits& limits, std::span<std::byte> workspace) override {
    if (refuses_large_ && limits.max_requests >= 1000) refuse();
    workspace_ = workspace;
    log_.push_back(name_ + " reserve " + std::to_string(workspace.size()));
  }
  Device device() const override { return device_; }
  const KvPool* kv() const override { return kv_; }
  const StatePool* state() const override { return state_; }
  void plan(const BatchView& batch, Stream) override {
    if (batch.requests < 0 || (refuses_large_ && batch.requests >= 1000)) refuse();
    log_.push_back(name_ + " plan");
  }
  void forward(const LayerTensors& layer, Stream) override {
    log_.push_back(name_ + " layer " + std::to_string(layer.layer));
  }

  std::span<std::byte> workspace_;
  Device device_;
  const KvPool* kv_ = nullptr;
  const StatePool* state_ = nullptr;
  bool refuses_large_ = false;

 private:
  [[noreturn]] static void refuse() { throw Error(ErrorCode::invalid_argument, "refused"); }

  std::string name_;
  size_t bytes_;
  std::vector<std::string>& log_;
};

using Log = std::vector<std::string>;

TEST(ComposeByPhase, RoutesEachModeAndForwardFollowsThePlan) {
  for (const Phase part : {Phase::prefill, Phase::decode}) {
    Log log;
    const auto both = compose_by_phase(std::make_unique<Recorder>("prefill", 100, log),
                                       std::make_unique<Recorder>("decode", 300, log), part);
    EXPECT_EQ(both->name(), "hybrid(prefill, decode)");
    EXPECT_THROW(both->forward({}), Error);
    for (const ForwardMode mode : {ForwardMode::decode, ForwardMode::extend, ForwardMode::mixed,
                                   ForwardMode::target_verify}) {
      both->plan({.mode = mode});
      both->forward({.layer = 5});
    }
    const std::string verify = part == Phase::decode ? "decode" : "prefill";
    EXPECT_EQ(log, (Log{"decode plan", "decode layer 5", "prefill plan", "prefill layer 5",
                        "prefill plan", "prefill layer 5", verify + " plan", verify + " layer 5"}));
  }
}

TEST(ComposeByMask, TreesHaveABackendOfTheirOwn) {
  Log log;
  const auto both = compose_by_mask(std::make_unique<Recorder>("plain", 100, log),
                                    std::make_unique<Recorder>("trees", 300, log));
  const uint64_t ancestors[] = {1};
  BatchView batch{.mode = ForwardMode::extend};
  both->plan(batch);
  batch.masks.tree.ancestors = ancestors;
  both->plan(batch);
  both->forward({.layer = 2});
  EXPECT_EQ(log, (Log{"plain plan", "trees plan", "trees layer 2"}));
  EXPECT_THROW((void)compose_by_mask(nullptr, std::make_unique<Recorder>("trees", 1, log)), Error);
}

TEST(ComposeByPhase, NoPlanOutlivesAReserveOrAPlanThatFails) {
  Log log;
  const auto both = compose_by_phase(std::make_unique<Recorder>("prefill", 1, log),
                                     std::make_unique<Recorder>("decode", 1, log));
  both->plan({.mode = ForwardMode::decode});
  EXPECT_NO_THROW(both->forward({}));
  EXPECT_THROW(both->plan({.mode = ForwardMode::decode, .requests = -1}), Error);
  EXPECT_THROW(both->forward({}), Error);
  both->plan({.mode = ForwardMode::decode});
  both->reserve({});
  EXPECT_THROW(both->forward({}), Error);
}

TEST(ComposeByPhase, PartsTakeTurnsInOneWorkspace) {
  Log log;
  auto prefill = std::make_unique<Recorder>("prefill", 100, log);
  auto decode = std::make_unique<Recorder>("decode", 300, log);
  const Recorder &first = *prefill, &second = *decode;
  const auto both = compose_by_phase(std::move(prefill), std::move(decode));
  EXPECT_EQ(both->workspace_bytes({}), 300u);
  alignas(64) std::byte memory[300];
  both->reserve({}, memory);
  EXPECT_EQ(first.workspace_.data(), memory);
  EXPECT_EQ(second.workspace_.data(), memory);
  EXPECT_THROW(both->reserve({}, std::span(memory).first(299)), Error);
  both->reserve({});
  EXPECT_EQ(first.workspace_.data(), second.workspace_.data());
  EXPECT_EQ(first.workspace_.size(), 300u);
}

// One part would not find the keys that the other stores.
TEST(ComposeByPhase, RefusesPartsOverTwoPools) {
  const KvCacheSpec cache{
      .layers = 1, .kv_heads = 1, .head_dim = 8, .head_dim_v = 8, .page_size = 4};
  const StateCacheSpec states{.layers = 1, .conv_width = 1, .heads = 1, .rows = 1, .columns = 1};
  const auto kv = make_kv_pool(cache, 2), other_kv = make_kv_pool(cache, 2);
  const auto state = make_state_pool(states, 2), other_state = make_state_pool(states, 2);
  Log log;
  const auto part = [&](const char* name, const KvPool* kv_pool, const StatePool* state_pool) {
    auto recorder = std::make_unique<Recorder>(name, 1, log);
    recorder->kv_ = kv_pool;
    recorder->state_ = state_pool;
    return recorder;
  };
  test::expect_invalid("'a' was created over the KvPool at", [&] {
    compose_by_phase(part("a", kv.get(), nullptr), part("b", other_kv.get(), nullptr));
  });
  test::expect_invalid("'a' was created over the StatePool at", [&] {
    compose_by_phase(part("a", nullptr, state.get()), part("b", nullptr, other_state.get()));
  });
  const auto both = compose_by_phase(part("a", nullptr, state.get()), part("b", kv.get(), nullptr));
  EXPECT_EQ(both->kv(), kv.get());
  EXPECT_EQ(both->state(), state.get());
}

// The library's own backends report the pools that they were created over.
TEST(ComposeByPhase, RefusesBackendsOverTwoPools) {
  const KvCacheSpec cache{
      .layers = 1, .kv_heads = 1, .head_dim = 8, .head_dim_v = 8, .page_size = 4};
  const AttentionSpec spec{.q_heads = 2, .kv_heads = 1, .head_dim = 8, .head_dim_v = 8};
  const auto pool = make_kv_pool(cache, 2), other = make_kv_pool(cache, 2);
  ThreadPool threads(1);
  const BackendRegistry registry = BackendRegistry::builtin();
  const auto create = [&](KvPool& kv) {
    return registry.find("reference")->create({.spec = spec, .kv = &kv, .threads = &threads});
  };
  EXPECT_NO_THROW(compose_by_phase(create(*pool), create(*pool)));
  test::expect_invalid("'reference' was created over the KvPool at",
                       [&] { compose_by_phase(create(*pool), create(*other)); });
}

TEST(ComposeByLayer, RoutesLayersAndPlansAll) {
  Log log;
  std::vector<std::unique_ptr<AttentionBackend>> parts;
  parts.push_back(std::make_unique<Recorder>("full", 100, log));
  parts.push_back(std::make_unique<Recorder>("linear", 70, log));
  const auto all = compose_by_layer(std::move(parts), {1, 1, 0, 1}, {0, 1, 0, 2});
  EXPECT_EQ(all->name(), "hybrid(full, linear)");
  all->plan({});
  for (int32_t layer = 0; layer < 4; ++layer) all->forward({.layer = layer});
  EXPECT_EQ(log, (Log{"full plan", "linear plan", "linear layer 0", "linear layer 1",
                      "full layer 0", "linear layer 2"}));
  EXPECT_THROW(all->forward({.layer = 4}), Error);
  EXPECT_THROW(all->forward({.layer = -1}), Error);
}

// This holds also if another part than the layer's refuses: the layer's plan is then new or old.
TEST(ComposeByLayer, NoPlanOutlivesAReserveOrAPlanThatFails) {
  for (const bool refuses_first : {true, false}) {
    Log log;
    const auto part = [&](const char* name, bool refuses) {
      auto recorder = std::make_unique<Recorder>(name, 1, log);
      recorder->refuses_large_ = refuses;
      return recorder;
    };
    std::vector<std::unique_ptr<AttentionBackend>> parts;
    parts.push_back(part("first", refuses_first));
    parts.push_back(part("second", !refuses_first));
    const auto all = compose_by_layer(std::move(parts), {0, 1}, {0, 0});
    const auto expect_no_plan = [&] {
      for (int32_t layer = 0; layer < 2; ++layer) {
        EXPECT_EQ(test::error_of([&] { all->forward({.layer = layer}); }),
                  "forward() without a plan");
      }
    };
    expect_no_plan();
    all->plan({});
    EXPECT_NO_THROW(all->forward({.layer = 0}));
    EXPECT_THROW(all->plan({.requests = 1000}), Error);
    expect_no_plan();
    all->plan({});
    EXPECT_THROW(all->reserve({.max_requests = 1000}), Error);
    expect_no_plan();
    all->reserve({});
    expect_no_plan();
  }
}

TEST(ComposeByLayer, PartsHaveBytesOfTheirOwn) {
  Log log;
  auto full = std::make_unique<Recorder>("full", 100, log);
  auto linear = std::make_unique<Recorder>("linear", 70, log);
  const Recorder &first = *full, &second = *linear;
  std::vector<std::unique_ptr<AttentionBackend>> parts;
  parts.push_back(std::move(full));
  parts.push_back(std::move(linear));
  const auto all = compose_by_layer(std::move(parts), {0, 1}, {0, 0});
  EXPECT_EQ(all->workspace_bytes({}), 256u);
  alignas(64) std::byte memory[256];
  all->reserve({}, memory);
  EXPECT_GE(first.workspace_.size(), 100u);
  EXPECT_GE(second.workspace_.size(), 70u);
  EXPECT_GE(second.workspace_.data(), first.workspace_.data() + first.workspace_.size());
  EXPECT_LE(second.workspace_.data() + second.workspace_.size(), memory + sizeof(memory));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(second.workspace_.data()) % 64, 0u);
  EXPECT_THROW(all->reserve({}, std::span(memory).first(255)), Error);
}

TEST(Compose, RefusesPartsThatDoNotFit) {
  Log log;
  EXPECT_THROW(compose_by_phase(nullptr, std::make_unique<Recorder>("decode", 1, log)), Error);
  EXPECT_THROW(compose_by_phase(std::make_unique<Recorder>("prefill", 1, log), nullptr), Error);
  EXPECT_THROW(compose_by_layer({}, {}, {}), Error);
  const auto one_part = [&] {
    std::vector<std::unique_ptr<AttentionBackend>> parts;
    parts.push_back(std::make_unique<Recorder>("full", 1, log));
    return parts;
  };
  EXPECT_THROW(compose_by_layer(one_part(), {0, 1}, {0, 0}), Error);
  EXPECT_THROW(compose_by_layer(one_part(), {0}, {0, 0}), Error);
  EXPECT_THROW(compose_by_layer(one_part(), {0}, {-1}), Error);
  EXPECT_THROW(compose_by_layer(one_part(), {-1}, {0}), Error);
  std::vector<std::unique_ptr<AttentionBackend>> parts = one_part();
  parts.push_back(nullptr);
  EXPECT_THROW(compose_by_layer(std::move(parts), {0}, {0}), Error);
  auto on_gpu = std::make_unique<Recorder>("gpu", 1, log);
  on_gpu->device_ = {DeviceKind::cuda, 1};
  parts = one_part();
  parts.push_back(std::make_unique<Recorder>(*on_gpu));
  test::expect_invalid("'gpu' on cuda:1", [&] { compose_by_layer(std::move(parts), {0}, {0}); });
  test::expect_invalid("verify is Phase(17)", [&] {
    compose_by_phase(std::make_unique<Recorder>("a", 1, log),
                     std::make_unique<Recorder>("b", 1, log), static_cast<Phase>(17));
  });
  test::expect_invalid("'gpu' on cuda:1", [&] {
    compose_by_phase(std::make_unique<Recorder>("cpu", 1, log), std::move(on_gpu));
  });
}

}  // namespace
}  // namespace fovea
