// SPDX-License-Identifier: Apache-2.0
// The algebra of partial attention: splitting the keys anywhere and merging the parts gives the
// result of all keys.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/reference/reference.h"
#include "support/expect_close.h"

namespace fovea {
namespace {

constexpr float kEmpty = -std::numeric_limits<float>::infinity();
constexpr int32_t kDim = 3;

struct State {
  std::vector<float> o = std::vector<float>(kDim, 0);
  float lse = kEmpty;
};

State merge(const std::vector<State>& parts) {
  std::vector<float> o, lse;
  for (const State& part : parts) {
    o.insert(o.end(), part.o.begin(), part.o.end());
    lse.push_back(part.lse);
  }
  State merged;
  kernels::MergeStatesParams params;
  params.o = o.data();
  params.lse = lse.data();
  params.o_part_stride = kDim;
  params.lse_part_stride = 1;
  params.parts = static_cast<int32_t>(parts.size());
  params.rows = params.heads = 1;
  params.dim = kDim;
  params.out = merged.o.data();
  params.out_lse = &merged.lse;
  kernels::reference::merge_states(params);
  return merged;
}

// Keys of one row: logits and values.
struct Keys {
  std::vector<float> logits;
  std::vector<std::vector<float>> values;
};

Keys random_keys(uint32_t seed, size_t count) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 1);
  Keys keys;
  for (size_t i = 0; i < count; ++i) {
    keys.logits.push_back(20 * normal(random));
    keys.values.push_back({normal(random), normal(random), normal(random)});
  }
  return keys;
}

// Returns the softmax attention over keys [begin, end).
State attend(const Keys& keys, size_t begin, size_t end) {
  State state;
  if (begin == end) return state;
  double largest = -INFINITY, sum = 0;
  for (size_t i = begin; i < end; ++i) largest = std::max<double>(largest, keys.logits[i]);
  std::vector<double> o(kDim, 0);
  for (size_t i = begin; i < end; ++i) {
    const double weight = std::exp(keys.logits[i] - largest);
    sum += weight;
    for (size_t d = 0; d < kDim; ++d) o[d] += weight * keys.values[i][d];
  }
  for (size_t d = 0; d < kDim; ++d) state.o[d] = static_cast<float>(o[d] / sum);
  state.lse = static_cast<float>(largest + std::log(sum));
  return state;
}

// Allows two ulp of the largest input and of the lse itself.
bool near(const State& a, const State& b) {
  if (a.lse == kEmpty || b.lse == kEmpty) return a.lse == b.lse && a.o == b.o;
  const float ulp = std::numeric_limits<float>::epsilon();
  float magnitude = 1;
  for (float x : a.o) magnitude = std::max(magnitude, std::fabs(x));
  // An ulp of the lse is a relative error of the weights.
  const float lse_error = 2 * ulp * std::max(1.0f, std::fabs(a.lse));
  if (!test::is_near(a.lse, b.lse, lse_error)) return false;
  for (size_t d = 0; d < kDim; ++d) {
    if (!test::is_near(a.o[d], b.o[d], (2 * ulp + 2 * lse_error) * magnitude)) return false;
  }
  return true;
}

// Returns cuts of [0, count) in ascending order. Some are equal: empty parts are legal.
std::vector<size_t> cuts(size_t count, size_t parts) {
  std::vector<size_t> cuts = {0, count};
  for (size_t i = 1; i < parts; ++i) cuts.push_back(*rc::gen::inRange<size_t>(0, count + 1));
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

TEST(MergeStates, AnySplitGivesTheWholeInAnyOrder) {
  EXPECT_TRUE(rc::check([] {
    const Keys keys =
        random_keys(*rc::gen::arbitrary<uint32_t>(), *rc::gen::inRange<size_t>(0, 200));
    const std::vector<size_t> at = cuts(keys.logits.size(), *rc::gen::inRange<size_t>(1, 65));
    std::vector<State> parts;
    for (size_t i = 0; i + 1 < at.size(); ++i) parts.push_back(attend(keys, at[i], at[i + 1]));
    const State whole = attend(keys, 0, keys.logits.size());
    RC_ASSERT(near(whole, merge(parts)));
    std::reverse(parts.begin(), parts.end());
    RC_ASSERT(near(whole, merge(parts)));
  }));
}

TEST(MergeStates, PairwiseMergingIsAssociativeAndCommutative) {
  EXPECT_TRUE(rc::check([] {
    const Keys keys =
        random_keys(*rc::gen::arbitrary<uint32_t>(), *rc::gen::inRange<size_t>(0, 60));
    const std::vector<size_t> at = cuts(keys.logits.size(), 3);
    const State a = attend(keys, at[0], at[1]);
    const State b = attend(keys, at[1], at[2]);
    const State c = attend(keys, at[2], at[3]);
    RC_ASSERT(near(merge({merge({a, b}), c}), merge({a, merge({b, c})})));
    RC_ASSERT(near(merge({a, b}), merge({b, a})));
    RC_ASSERT(near(merge({a, State()}), a));
  }));
}

TEST(MergeStates, TwoEmptyPartsGiveAnEmptyResult) {
  State poisoned;  // the o of an empty part is never read
  poisoned.o = {NAN, INFINITY, NAN};
  const State merged = merge({poisoned, State(), poisoned});
  EXPECT_EQ(merged.lse, kEmpty);
  EXPECT_EQ(merged.o, std::vector<float>(kDim, 0));
  State one;
  one.o = {1, -2, 3};
  one.lse = -700;
  const State kept = merge({poisoned, one});
  EXPECT_EQ(kept.o, one.o);
  EXPECT_EQ(kept.lse, one.lse);
}

// The result and part 0 may share memory, for several rows and heads.
TEST(MergeStates, WorksInPlace) {
  constexpr int64_t kRows = 5;
  constexpr int32_t kHeads = 2;
  std::vector<float> o(2 * kRows * kHeads * kDim), lse(2 * kRows * kHeads);
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0, 1);
  for (float& x : o) x = normal(random);
  for (float& x : lse) x = normal(random);
  lse[2] = kEmpty;
  std::vector<float> out(kRows * kHeads * kDim), out_lse(kRows * kHeads);
  kernels::MergeStatesParams params;
  params.o = o.data();
  params.lse = lse.data();
  params.o_part_stride = kRows * kHeads * kDim;
  params.lse_part_stride = kRows * kHeads;
  params.parts = 2;
  params.rows = kRows;
  params.heads = kHeads;
  params.dim = kDim;
  params.out = out.data();
  params.out_lse = out_lse.data();
  kernels::reference::merge_states(params);
  params.out = o.data();
  params.out_lse = lse.data();
  kernels::reference::merge_states(params);
  o.resize(out.size());
  lse.resize(out_lse.size());
  EXPECT_EQ(o, out);
  EXPECT_EQ(lse, out_lse);
}

}  // namespace
}  // namespace fovea
