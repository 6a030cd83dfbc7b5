// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "fovea/kv_cache.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using test::expect_invalid;

StateCacheSpec state_spec() {
  StateCacheSpec spec;
  spec.layers = 2;
  spec.conv_dim = 5;
  spec.conv_width = 4;
  spec.heads = 3;
  spec.rows = 2;
  spec.columns = 7;
  return spec;
}

TEST(StatePool, SlotsAreDisjointZeroedAndCopied) {
  const auto pool = make_state_pool(state_spec(), 4);
  EXPECT_EQ(state_spec().bytes_per_slot(), 2u * (5 * 3 + 3 * 2 * 7) * sizeof(float));
  const auto fill = [&](int32_t slot, float value) {
    for (int32_t i = 0; i < 2; ++i) {
      const StateLayerView layer = pool->layer(i);
      std::fill_n(layer.conv + slot * layer.conv_slot_stride, 15, value + static_cast<float>(i));
      std::fill_n(layer.state_as<float>() + slot * layer.state_slot_stride, 42,
                  value - static_cast<float>(i));
    }
  };
  const auto expect = [&](int32_t slot, float conv, float step) {
    for (int32_t i = 0; i < 2; ++i) {
      const StateLayerView layer = pool->layer(i);
      for (int j = 0; j < 15; ++j) {
        ASSERT_EQ(layer.conv[slot * layer.conv_slot_stride + j],
                  conv + step * static_cast<float>(i));
      }
      for (int j = 0; j < 42; ++j) {
        ASSERT_EQ(layer.state_as<float>()[slot * layer.state_slot_stride + j],
                  conv - step * static_cast<float>(i));
      }
    }
  };
  std::set<int32_t> slots;
  for (int i = 0; i < 3; ++i) slots.insert(pool->allocate().value());
  EXPECT_EQ(slots, (std::set<int32_t>{1, 2, 3}));
  EXPECT_FALSE(pool->allocate());
  EXPECT_EQ(pool->free_slots(), 0);
  for (const int32_t slot : slots) fill(slot, static_cast<float>(10 * slot));
  for (const int32_t slot : slots) expect(slot, static_cast<float>(10 * slot), 1);
  expect(0, 0, 0);
  pool->copy(1, 3);
  expect(3, 10, 1);
  expect(2, 20, 1);
  pool->release(2);
  EXPECT_EQ(pool->allocate(), 2);
  expect(2, 0, 0);
}

// A copy has the drafts that its slot keeps; a slot that is taken again has none.
TEST(StatePool, CopiesHaveKeptDrafts) {
  StateCacheSpec spec = state_spec();
  const size_t without = spec.bytes_per_slot();
  EXPECT_EQ(make_state_pool(spec, 2)->marks(), nullptr);
  EXPECT_EQ(make_state_pool(spec, 2)->layer(0).drafts, nullptr);
  spec.max_drafts = 3;
  spec.draft_inputs = 8;
  EXPECT_EQ(spec.bytes_per_slot(), without + 2 * 6 * 8 * sizeof(float) + sizeof(StateMark));
  const auto pool = make_state_pool(spec, 4);
  const int32_t slot = pool->allocate().value(), other = pool->allocate().value();
  constexpr int64_t kValues = 6 * 8;
  for (int32_t layer = 0; layer < 2; ++layer) {
    std::fill_n(pool->layer(layer).drafts + slot * kValues, kValues,
                5.0f + static_cast<float>(layer));
  }
  pool->marks()[slot] = {.tokens = 7, .drafts = 2, .row = 4};
  pool->copy(slot, other);
  for (int32_t layer = 0; layer < 2; ++layer) {
    const float* const drafts = pool->layer(layer).drafts;
    const std::vector<float> copied(drafts + other * kValues, drafts + (other + 1) * kValues);
    EXPECT_EQ(copied, std::vector<float>(kValues, 5.0f + static_cast<float>(layer)));
  }
  EXPECT_EQ(pool->marks()[other].tokens, 7);
  EXPECT_EQ(pool->marks()[other].drafts, 2);
  EXPECT_EQ(pool->marks()[other].row, 4);
  pool->release(slot);
  EXPECT_EQ(pool->allocate(), slot);
  EXPECT_EQ(pool->marks()[slot].tokens, 0);
  EXPECT_EQ(pool->marks()[slot].drafts, 0);
}

// Layers that only convolve have windows and no states.
TEST(StatePool, WindowsNeedNoStates) {
  StateCacheSpec spec = state_spec();
  spec.heads = spec.rows = spec.columns = 0;
  EXPECT_EQ(spec.bytes_per_slot(), 2u * 5 * 3 * sizeof(float));
  const auto pool = make_state_pool(spec, 3);
  const int32_t first = pool->allocate().value(), second = pool->allocate().value();
  const StateLayerView layer = pool->layer(1);
  EXPECT_EQ(layer.state_slot_stride, 0);
  std::fill_n(layer.conv + first * layer.conv_slot_stride, 15, 7.0f);
  pool->copy(first, second);
  EXPECT_EQ(layer.conv[second * layer.conv_slot_stride + 14], 7);
  EXPECT_EQ(layer.conv[14], 0);
  const auto refused = [&](auto change) {
    StateCacheSpec wrong = spec;
    change(wrong);
    expect_invalid("heads is 0, must be positive", [&] { make_state_pool(wrong, 3); });
  };
  refused([](StateCacheSpec& s) { s.conv_width = 1; });
  refused([](StateCacheSpec& s) { s.conv_dim = 0; });
  refused([](StateCacheSpec& s) { s.columns = 1; });
}

TEST(StatePool, MisuseIsAnError) {
  const auto pool = make_state_pool(state_spec(), 3);
  const int32_t slot = pool->allocate().value();
  EXPECT_TRUE(pool->in_use(slot));
  pool->release(slot);
  for (const int32_t other : {slot, 0, 3, -1}) EXPECT_FALSE(pool->in_use(other)) << other;
  expect_invalid("state slot " + std::to_string(slot), [&] { pool->release(slot); });
  expect_invalid("state slot 0", [&] { pool->release(0); });
  expect_invalid("state slot 3", [&] { pool->copy(3, 3); });
  expect_invalid("slots is 1", [] { make_state_pool(state_spec(), 1); });
  StateCacheSpec spec = state_spec();
  spec.conv_width = 0;
  expect_invalid("conv_width is 0", [&] { make_state_pool(spec, 2); });
  spec = state_spec();
  spec.max_drafts = 65;
  expect_invalid("max_drafts is 65, must be in [0, 64]", [&] { make_state_pool(spec, 2); });
  spec.max_drafts = 4;
  expect_invalid("draft_inputs is 0, must be positive with max_drafts 4",
                 [&] { make_state_pool(spec, 2); });
  spec = state_spec();
  spec.draft_inputs = 8;
  expect_invalid("draft_inputs is 8, must be 0 with max_drafts 0",
                 [&] { make_state_pool(spec, 2); });
  spec = state_spec();
  spec.heads = spec.rows = spec.columns = std::numeric_limits<int32_t>::max();
  expect_invalid("overflows", [&] { make_state_pool(spec, 2); });
}

}  // namespace
}  // namespace fovea
