// SPDX-License-Identifier: Apache-2.0
// The kernels of sums over ranks, one rank at a time: the messages of the others are there before
// it starts. Skipped without a GPU.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "core/float_types.h"
#include "gpu/rank_inbox.h"
#include "kernels/cuda/portable/rank_sum/launch.h"
#include "support/device_array.h"
#include "support/gpu_kernel_test.h"

namespace fovea::kernels::cuda {
namespace {

using test::to_device;
using test::to_host;

constexpr int64_t kCapacity = 8192;

// The values of all ranks, and one of the ranks as the kernels see it.
class World {
 public:
  World(int ranks, int own, int64_t count) : own_(own), inbox_(ranks, own, kCapacity) {
    std::mt19937 random(static_cast<uint32_t>(ranks * 1000 + own));
    std::normal_distribution<float> normal;
    for (int rank = 0; rank < ranks; ++rank) {
      std::vector<float>& values = values_.emplace_back(static_cast<size_t>(count));
      for (float& value : values) value = normal(random);
    }
  }

  const std::vector<float>& values(int rank) const { return values_[static_cast<size_t>(rank)]; }
  test::Inbox& inbox() { return inbox_; }
  RankBoxes boxes() const { return inbox_.boxes(); }
  void make_nan(int rank, size_t i, uint32_t bits) {
    values_[static_cast<size_t>(rank)][i] = std::bit_cast<float>(bits);
  }

  // The others' messages arrive in the box of this turn.
  void deliver(int turn) const {
    for (size_t rank = 0; rank < values_.size(); ++rank) {
      if (static_cast<int>(rank) != own_)
        inbox_.deliver(turn, static_cast<int>(rank), message(rank));
    }
  }

  // Expects that every other rank got this rank's message, and that the box before is clear.
  void expect_sent(int turn) const {
    for (size_t rank = 0; rank < values_.size(); ++rank) {
      if (static_cast<int>(rank) == own_) continue;
      const std::vector<uint32_t> words = message(static_cast<size_t>(own_));
      EXPECT_EQ(inbox_.sent(turn, static_cast<int>(rank), words.size()), words);
    }
    EXPECT_EQ(inbox_.kept((turn + kBoxes - 1) % kBoxes), 0);
    EXPECT_EQ(inbox_.counters().turn, static_cast<uint32_t>((turn + 1) % kBoxes));
    EXPECT_EQ(inbox_.counters().finished, 0u);
  }

  // In the order of the ranks, as every rank adds.
  std::vector<float> sum() const {
    std::vector<float> sum(values_[0].size(), 0);
    for (const std::vector<float>& values : values_) {
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
    }
    return sum;
  }

 private:
  std::vector<uint32_t> message(size_t rank) const {
    std::vector<uint32_t> words;
    for (const float value : values_[rank]) {
      const auto bits = std::bit_cast<uint32_t>(value);
      words.push_back(bits == kNotArrived ? kOtherNan : bits);
    }
    return words;
  }

  int own_;
  test::Inbox inbox_;
  std::vector<std::vector<float>> values_;
};

class GpuRankSum : public test::GpuKernelTest<::testing::Test> {
 protected:
  static RankSum load() { return {context->info().sm, *store}; }

  static SumValuesParams sum_params(const World& world, const gpu::DeviceBuffer& send,
                                    const gpu::DeviceBuffer& receive, int64_t count) {
    return {send.data<float>(), receive.data<float>(), count, world.boxes()};
  }
};

TEST_F(GpuRankSum, AddsInTheOrderOfTheRanks) {
  const RankSum kernels = load();
  for (const int ranks : {1, 2, 3, 8}) {
    for (const int own : {0, ranks - 1}) {
      for (const int64_t count : {4, 2048, 2052, 8192}) {
        SCOPED_TRACE(testing::Message() << "rank " << own << " of " << ranks << ", " << count);
        World world(ranks, own, count);
        const auto send = to_device(world.values(own));
        const auto receive = to_device(std::vector<float>(static_cast<size_t>(count), -1));
        const SumValuesParams params = sum_params(world, send, receive, count);
        ASSERT_TRUE(RankSum::serves(params));
        for (int turn = 0; turn < 2 * kBoxes; ++turn) {
          world.deliver(turn % kBoxes);
          kernels.sum(params, nullptr);
          EXPECT_EQ(to_host<float>(receive, static_cast<size_t>(count)), world.sum());
          world.expect_sent(turn % kBoxes);
        }
        EXPECT_EQ(world.inbox().stop(), 0u);
      }
    }
  }
}

// The NaN that marks missing words, on either side.
TEST_F(GpuRankSum, NansArriveAsNans) {
  const RankSum kernels = load();
  World world(2, 0, 16);
  world.make_nan(0, 3, kNotArrived);
  world.make_nan(1, 9, kNotArrived);
  const auto send = to_device(world.values(0));
  const auto receive = to_device(std::vector<float>(16, -1));
  world.deliver(0);
  kernels.sum(sum_params(world, send, receive, 16), nullptr);
  const auto got = to_host<float>(receive, 16);
  for (size_t i = 0; i < 16; ++i) EXPECT_EQ(std::isnan(got[i]), i == 3 || i == 9) << i;
  world.expect_sent(0);
}

// A step of the residual stream, on one of three ranks.
class ResidualSteps : public GpuRankSum {
 protected:
  static constexpr float kFactor = 0.5f, kEpsilon = 1e-5f;

  // sends: the kernel sends its branch; otherwise the product before it did.
  static void check(int32_t rows, int32_t dim, bool norms_branch, bool sends) {
    SCOPED_TRACE(testing::Message() << rows << " x " << dim << ", norm of the branch "
                                    << norms_branch << ", sends " << sends);
    const size_t count = static_cast<size_t>(rows) * static_cast<size_t>(dim);
    World world(3, 1, static_cast<int64_t>(count));
    std::vector<float> x(count), weight(static_cast<size_t>(dim));
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    for (float& value : x) value = normal(random);
    for (float& value : weight) value = normal(random);
    const auto on_gpu = to_device(x), branch = to_device(world.values(1)), w = to_device(weight);
    const auto normed = to_device(std::vector<uint16_t>(count, 0));
    SumResidualParams params{};
    params.residual.x = on_gpu.data<float>();
    params.residual.branch = branch.data<float>();
    params.residual.branch_factor = kFactor;
    params.residual.norm = {w.data<float>(), kEpsilon, 1};
    if (norms_branch) params.residual.branch_norm = {w.data<float>(), kEpsilon, 0};
    params.residual.normed = normed.data();
    params.residual.normed_stride = dim;
    params.residual.rows = rows;
    params.residual.dim = dim;
    params.boxes = world.boxes();
    params.boxes.sends = sends ? 1 : 0;
    ASSERT_TRUE(RankSum::serves(params));
    world.deliver(0);
    load().add(params, nullptr);
    const auto got = to_host<float>(on_gpu, count);
    const auto got_normed = to_host<uint16_t>(normed, count);
    for (size_t first = 0; first < count; first += weight.size()) {
      expect_row({world.sum(), x, got, got_normed, weight}, first, norms_branch);
    }
    if (sends) return world.expect_sent(0);
    for (const int other : {0, 2}) {
      EXPECT_EQ(world.inbox().sent(0, other, count), std::vector<uint32_t>(count, kNotArrived));
    }
    EXPECT_EQ(world.inbox().counters().turn, 1u);
  }

 private:
  struct Values {
    std::vector<float> sum, x, got;
    std::vector<uint16_t> got_normed;
    std::vector<float> weight;
  };
  // Returns the factor of a norm.
  static double inverse_rms(const float* values, size_t count) {
    double squares = 0;
    for (size_t i = 0; i < count; ++i) squares += double{values[i]} * values[i];
    return 1 / std::sqrt(squares / static_cast<double>(count) + kEpsilon);
  }
  static void expect_row(const Values& values, size_t first, bool norms_branch) {
    const size_t dim = values.weight.size();
    const double of_branch = norms_branch ? inverse_rms(&values.sum[first], dim) : 1;
    const double factor = inverse_rms(&values.got[first], dim);
    for (size_t i = first; i < first + dim; ++i) {
      const double weight = values.weight[i - first];
      const double branch = values.sum[i] * of_branch * (norms_branch ? weight : 1);
      ASSERT_NEAR(values.got[i], values.x[i] + kFactor * branch, 1e-5) << i;
      const double want = values.got[i] * factor * (1 + weight);
      ASSERT_NEAR(bf16_to_float(values.got_normed[i]), want, 0.01 * std::fabs(want) + 1e-6) << i;
    }
  }
};

// Blocks of 256 threads keep 4096 values, those of 512 keep 8192.
TEST_F(ResidualSteps, AddTheSumAndNorm) {
  for (const auto& [rows, dim] : {std::pair{3, 2048}, {2, 4096}, {1, 4100}, {1, 8192}}) {
    for (const bool norms_branch : {false, true}) {
      for (const bool sends : {true, false}) check(rows, dim, norms_branch, sends);
    }
  }
}

// Messages in another box do not count.
TEST_F(GpuRankSum, StopsWaitingInTime) {
  const RankSum kernels = load();
  World world(2, 0, 64);
  world.deliver(1);
  const auto send = to_device(world.values(0));
  const auto receive = to_device(std::vector<float>(64, -1));
  kernels.sum(sum_params(world, send, receive, 64), nullptr);
  gpu::synchronize(nullptr);
  EXPECT_EQ(world.inbox().stop(), 1u);
}

TEST_F(GpuRankSum, StopsWaitingIfTold) {
  const RankSum kernels = load();
  World world(2, 1, 64);
  world.inbox().set_stop();
  const auto send = to_device(world.values(1));
  const auto receive = to_device(std::vector<float>(64, -1));
  SumValuesParams params = sum_params(world, send, receive, 64);
  params.boxes.timeout_ns = int64_t{1} << 60;
  kernels.sum(params, nullptr);
  gpu::synchronize(nullptr);
  EXPECT_EQ(world.inbox().counters().turn, 1u);
}

TEST(RankSum, ServesWhatFitsAndIsAligned) {
  alignas(16) float memory[64];
  SumValuesParams params{memory, memory, 16, {}};
  params.boxes.part_stride = 16;
  EXPECT_TRUE(RankSum::serves(params));
  params.count = 20;
  EXPECT_FALSE(RankSum::serves(params));
  params.count = 14;
  EXPECT_FALSE(RankSum::serves(params));
  params.count = 8;
  params.send = memory + 1;
  EXPECT_FALSE(RankSum::serves(params));
}

}  // namespace
}  // namespace fovea::kernels::cuda
