// SPDX-License-Identifier: Apache-2.0
// Joining partial attention on a GPU: any split of the keys gives the result of all keys, and the
// algebraic laws that follow. Skipped without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/cuda/common/attention_params.h"
#include "support/device_array.h"
#include "support/expect_close.h"
#include "support/gpu_kernel_test.h"

namespace fovea::kernels::cuda {
namespace {

using test::to_device;
using test::to_host;

constexpr int32_t kRows = 64;  // a whole row tile: 16 tokens of 4 heads
constexpr int32_t kHeads = 4, kDim = 80, kKeys = 200;
constexpr float kEmpty = -std::numeric_limits<float>::infinity();
constexpr double kEpsilon = std::numeric_limits<float>::epsilon();

// The softmax attention of every row over some keys.
struct State {
  std::vector<float> out = std::vector<float>(kRows * kDim, 0);
  std::vector<float> lse = std::vector<float>(kRows, kEmpty);
};

// Random scores and values, |value| <= 1. The states of any subset of the keys come from fp64.
class Keys {
 public:
  explicit Keys(uint32_t seed) : random_(seed) {
    std::uniform_real_distribution<double> uniform(-1, 1);
    for (double& score : scores_) score = 12 * uniform(random_);
    for (double& value : values_) value = uniform(random_);
  }
  State state(int32_t begin, int32_t end) const {
    State state;
    for (int32_t row = 0; row < kRows && begin < end; ++row) {
      const double* scores = &scores_[static_cast<size_t>(row * kKeys)];
      const double most = *std::max_element(scores + begin, scores + end);
      double total = 0;
      for (int32_t key = begin; key < end; ++key) total += std::exp(scores[key] - most);
      state.lse[static_cast<size_t>(row)] = static_cast<float>(most + std::log(total));
      for (int32_t d = 0; d < kDim; ++d) {
        double sum = 0;
        for (int32_t key = begin; key < end; ++key) {
          sum += std::exp(scores[key] - most) * values_[static_cast<size_t>(key * kDim + d)];
        }
        state.out[static_cast<size_t>(row * kDim + d)] = static_cast<float>(sum / total);
      }
    }
    return state;
  }
  // Returns `parts` parts of all keys, cut at random positions: some are empty.
  std::vector<State> split(int32_t parts) {
    std::vector<int32_t> cuts{0, kKeys};
    std::uniform_int_distribution<int32_t> place(0, kKeys);
    for (int32_t i = 1; i < parts; ++i) cuts.push_back(place(random_));
    std::ranges::sort(cuts);
    std::vector<State> states;
    for (size_t i = 0; i + 1 < cuts.size(); ++i) states.push_back(state(cuts[i], cuts[i + 1]));
    return states;
  }

 private:
  std::mt19937 random_;
  std::vector<double> scores_ = std::vector<double>(kRows * kKeys);
  std::vector<double> values_ = std::vector<double>(kKeys * kDim);
};

class GpuMergeStates : public test::GpuKernelTest<::testing::Test> {
 protected:
  static State merge(const std::vector<State>& parts) {
    constexpr int32_t kTokens = kRows / kHeads;
    State joined;
    std::vector<float> out(2 * parts.size() * kRows * kDim, 0), lse(2 * parts.size() * kRows, 0);
    for (size_t part = 0; part < parts.size(); ++part) {
      const size_t slot = part == 0 ? 0 : 2 * part - 1;
      std::ranges::copy(parts[part].out, &out[slot * kRows * kDim]);
      std::ranges::copy(parts[part].lse, &lse[slot * kRows]);
    }
    const auto partial_out = to_device(out), partial_lse = to_device(lse);
    const auto merges =
        to_device(std::vector<MergeItem>{{0, 0, 0, 0, static_cast<int32_t>(parts.size())}});
    const auto q_indptr = to_device(std::vector<int32_t>{0, kTokens});
    const auto joined_out = to_device(joined.out), joined_lse = to_device(joined.lse);
    MergeParams params{};
    params.batch.q_indptr = q_indptr.data<int32_t>();
    params.batch.requests = 1;
    params.batch.q_heads = kHeads;
    params.batch.kv_heads = 1;
    params.work.merges = merges.data<MergeItem>();
    params.work.partial_out = partial_out.data<float>();
    params.work.partial_lse = partial_lse.data<float>();
    params.out = joined_out.data();
    params.lse = joined_lse.data<float>();
    params.lse_token_stride = kHeads;
    params.head_dim_v = kDim;
    params.f32_out = 1;
    load("portable/merge", {"64", "bf16"}).launch({1}, params, nullptr);
    joined.out = to_host<float>(joined_out, joined.out.size());
    joined.lse = to_host<float>(joined_lse, joined.lse.size());
    return joined;
  }

  // Values are at most 1 and weights sum to 1. A term is rounded a few times. The fast exponential
  // is off by 2 ulp and one more per unit of a score, but such weights are small.
  static void expect_near(const State& actual, const State& expected, int32_t parts) {
    const double error = (8 + 2 * std::sqrt(parts)) * kEpsilon;
    for (size_t i = 0; i < actual.out.size(); ++i) {
      ASSERT_NEAR(actual.out[i], expected.out[i], error) << parts << " parts, at " << i;
    }
    for (size_t i = 0; i < actual.lse.size(); ++i) {
      const double scale = std::max(1.0f, std::fabs(expected.lse[i]));
      ASSERT_TRUE(test::is_near(actual.lse[i], expected.lse[i], 4 * kEpsilon * scale))
          << parts << " parts";
    }
  }
};

TEST_F(GpuMergeStates, AnySplitIsTheWholeInAnyOrder) {
  std::mt19937 random(7);
  for (int32_t parts = 1; parts <= 64; ++parts) {
    SCOPED_TRACE(parts);
    Keys keys(static_cast<uint32_t>(parts));
    const State whole = keys.state(0, kKeys);
    std::vector<State> split = keys.split(parts);
    expect_near(merge(split), whole, parts);
    std::ranges::shuffle(split, random);
    expect_near(merge(split), whole, parts);
  }
}

TEST_F(GpuMergeStates, IsAssociative) {
  Keys keys(1);
  const std::vector<State> split = keys.split(9);
  const State whole = merge(split);
  for (const int32_t cut : {1, 4, 8}) {
    const State head = merge({split.begin(), split.begin() + cut});
    const State tail = merge({split.begin() + cut, split.end()});
    expect_near(merge({head, tail}), whole, 9);
  }
}

TEST_F(GpuMergeStates, EmptyPartsChangeNoBit) {
  Keys keys(2);
  const std::vector<State> split = keys.split(5);
  const State joined = merge(split);
  std::vector<State> padded = {State{}};
  for (const State& part : split) padded.insert(padded.end(), {part, State{}});
  const State same = merge(padded);
  EXPECT_EQ(same.out, joined.out);
  EXPECT_EQ(same.lse, joined.lse);
  const State nothing = merge({State{}, State{}});
  EXPECT_EQ(nothing.out, State{}.out);
  EXPECT_EQ(nothing.lse, State{}.lse);
}

}  // namespace
}  // namespace fovea::kernels::cuda
