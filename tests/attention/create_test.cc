// SPDX-License-Identifier: Apache-2.0
// Errors of creation and reserve().
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "attention/two_requests.h"
#include "fovea/merge_states.h"
#include "fovea/select_backend.h"

namespace fovea {
namespace {

using test::expect_invalid;
using test::kPages;
using Fixture = test::TwoRequests;

TEST(Reserve, RefusesLimitsNobodyCanMean) {
  constexpr int32_t kMaxInt = std::numeric_limits<int32_t>::max();
  Fixture fixture;
  fixture.create();
  EXPECT_THROW(
      (void)fixture.backend->workspace_bytes({kMaxInt, kMaxInt, kMaxInt, kMaxInt, kMaxInt}), Error);
  fixture.spec.q_heads = 1 << 22;
  expect_invalid("at most 16777216", [&] { fixture.create(); });
}

TEST(Reserve, NamesTheBytesAWorkspaceNeeds) {
  Fixture fixture;
  fixture.create();
  const size_t needed = fixture.backend->workspace_bytes(fixture.limits);
  EXPECT_EQ(reference_backend().workspace_bytes(
                {fixture.spec, fixture.cache, fixture.limits, {.cores = 1}}),
            needed);
  alignas(64) std::byte memory[4096];
  ASSERT_LE(needed + 1, sizeof(memory));
  fixture.backend->reserve(fixture.limits, {memory, needed});
  test::expect_error(ErrorCode::workspace_too_small, std::to_string(needed), [&] {
    fixture.backend->reserve(fixture.limits, {memory, needed - 1});
  });
  expect_invalid("aligned to 64", [&] {
    fixture.backend->reserve(fixture.limits, {memory + 1, needed});
  });
  expect_invalid("workspace is null, of " + std::to_string(needed) + " bytes", [&] {
    fixture.backend->reserve(fixture.limits, {static_cast<std::byte*>(nullptr), needed});
  });
  EXPECT_NO_THROW(fixture.backend->plan(fixture.batch)) << "what was reserved before is gone";
}

TEST(Create, RefusesPoolsThatDoNotFit) {
  ThreadPool threads(1);
  const Fixture fixture;
  const BackendEntry entry = reference_backend();
  KvCacheSpec wide = fixture.cache;
  wide.head_dim = 16;
  const auto pool = make_kv_pool(fixture.cache, kPages), other = make_kv_pool(wide, kPages);
  const auto refuses = [&](const char* words, KvPool* kv, ThreadPool* pool_of_threads) {
    expect_invalid(words, [&] { entry.create({fixture.spec, kv, nullptr, pool_of_threads}); });
  };
  refuses("kv is null", nullptr, &threads);
  refuses("cache head_dim is 16", other.get(), &threads);
  refuses("threads is null", pool.get(), nullptr);
}

// A device is the only CPU, or a GPU.
TEST(Create, RefusesDevicesThatAreNone) {
  ThreadPool threads(1);
  const Fixture fixture;
  const auto pool = make_kv_pool(fixture.cache, kPages);
  const std::vector<std::pair<const char*, Device>> devices = {
      {"device is the CPU with index 7, must be 0: there is one CPU", {DeviceKind::cpu, 7}},
      {"device has index -1, must not be negative", {DeviceKind::cpu, -1}},
      {"device has kind DeviceKind(17), accepted: cpu, cuda", {static_cast<DeviceKind>(17), 0}},
  };
  const BackendRegistry registry = BackendRegistry::builtin();
  for (const auto& [words, device] : devices) {
    SCOPED_TRACE(words);
    const auto on = device;
    for (const BackendEntry& entry : registry.entries()) {
      if (!entry.why_not_built.empty()) continue;
      expect_invalid(words, [&] {
        entry.create({.spec = fixture.spec, .kv = pool.get(), .threads = &threads, .device = on});
      });
    }
    expect_invalid(words, [&] { make_kv_pool(fixture.cache, kPages, on); });
    KvCacheSpec window = fixture.cache;
    window.window = 8;
    expect_invalid(words, [&] { make_window_kv_pool(window, kPages, 48, on); });
    expect_invalid(words, [&] {
      make_state_merger({.dtype = DType::f32, .heads = 1, .dim = 1}, on, &threads);
    });
    BackendRequest request{.spec = fixture.spec, .cache = fixture.cache, .device = {.cores = 1}};
    request.device.kind = on.kind;
    request.device.index = on.index;
    expect_invalid(words, [&] { (void)select_backend(registry, request); });
  }
  EXPECT_EQ(device_name({static_cast<DeviceKind>(17), 0}), "DeviceKind(17)");
}

// No check divides by a width of 0, in any order of calls.
TEST(Create, RefusesSpecsNobodyCanMean) {
  ThreadPool threads(1);
  const Fixture fixture;
  const auto pool = make_kv_pool(fixture.cache, kPages);
  const BackendRegistry registry = BackendRegistry::builtin();
  for (const BackendEntry& entry : registry.entries()) {
    if (!entry.why_not_built.empty()) continue;
    SCOPED_TRACE(entry.name);
    const BackendRequest nothing = {.spec = {}, .device = {.cores = 1}};
    expect_invalid("q_heads is 0", [&] { entry.create({{}, pool.get(), nullptr, &threads}); });
    expect_invalid("q_heads is 0", [&] { (void)entry.reject(nothing); });
    expect_invalid("q_heads is 0", [&] { (void)entry.workspace_bytes(nothing); });
  }
}

}  // namespace
}  // namespace fovea
