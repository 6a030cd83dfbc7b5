// SPDX-License-Identifier: Apache-2.0
// The kernels of sums over ranks, one rank at a time: the messages of the others are there before
// it starts. Skipped without a GPU.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "core/float_types.h"
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
  World(int ranks, int own, int64_t count) : ranks_(ranks), own_(own), count_(count) {
    std::mt19937 random(static_cast<uint32_t>(ranks * 1000 + own));
    std::normal_distribution<float> normal;
    for (int rank = 0; rank < ranks; ++rank) {
      std::vector<float>& values = values_.emplace_back(static_cast<size_t>(count));
      for (float& value : values) value = normal(random);
      inboxes_.push_back(to_device(std::vector<uint32_t>(inbox_words(), 0)));
    }
    counters_ = to_device(std::vector<RankCounters>(1));
    stop_ = to_device(std::vector<uint32_t>(1, 0));
  }

  const std::vector<float>& values(int rank) const { return values_[static_cast<size_t>(rank)]; }

  RankMessages messages() const {
    RankMessages messages{};
    for (int rank = 0; rank < ranks_; ++rank) {
      messages.inboxes[rank] = inboxes_[static_cast<size_t>(rank)].data<uint32_t>();
    }
    messages.counters = counters_.data<RankCounters>();
    messages.stop = stop_.data<uint32_t>();
    messages.capacity = kCapacity;
    messages.timeout_ns = 2'000'000;
    messages.rank = own_;
    messages.ranks = ranks_;
    return messages;
  }

  // The others' messages of this epoch arrive.
  void deliver(uint32_t epoch) const {
    const gpu::DeviceBuffer& inbox = inboxes_[static_cast<size_t>(own_)];
    auto words = to_host<uint32_t>(inbox, inbox_words());
    for (int rank = 0; rank < ranks_; ++rank) {
      if (rank == own_) continue;
      for (int64_t i = 0; i < count_; ++i) {
        const size_t at = word(epoch, rank, i);
        words[at] = std::bit_cast<uint32_t>(values(rank)[static_cast<size_t>(i)]);
        words[at + 1] = epoch;
      }
    }
    gpu::copy_to_device(inbox.data(), words.data(), inbox.bytes(), nullptr);
    gpu::synchronize(nullptr);
  }

  // Expects that every other rank got this rank's message.
  void expect_sent(uint32_t epoch) const {
    for (int rank = 0; rank < ranks_; ++rank) {
      if (rank == own_) continue;
      const auto words = to_host<uint32_t>(inboxes_[static_cast<size_t>(rank)], inbox_words());
      for (int64_t i = 0; i < count_; ++i) {
        const size_t at = word(epoch, own_, i);
        ASSERT_EQ(words[at], std::bit_cast<uint32_t>(values(own_)[static_cast<size_t>(i)])) << i;
        ASSERT_EQ(words[at + 1], epoch) << i;
      }
    }
  }

  RankCounters counters() const { return to_host<RankCounters>(counters_, 1)[0]; }
  void set_epoch(uint32_t epoch) { counters_ = to_device(std::vector<RankCounters>{{epoch, 0}}); }
  uint32_t stop() const { return to_host<uint32_t>(stop_, 1)[0]; }
  void set_stop() { stop_ = to_device(std::vector<uint32_t>(1, 1)); }

  // In the order of the ranks, as every rank adds.
  std::vector<float> sum() const {
    std::vector<float> sum(static_cast<size_t>(count_), 0);
    for (const std::vector<float>& values : values_) {
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
    }
    return sum;
  }

 private:
  size_t inbox_words() const {
    return static_cast<size_t>(2 * ranks_) * static_cast<size_t>(kCapacity) * 2;
  }
  size_t word(uint32_t epoch, int rank, int64_t i) const {
    const int64_t box = static_cast<int64_t>(epoch % 2) * ranks_ + rank;
    return static_cast<size_t>(2 * box * kCapacity + word_of_value(i));
  }

  int ranks_, own_;
  int64_t count_;
  std::vector<std::vector<float>> values_;
  std::vector<gpu::DeviceBuffer> inboxes_;
  gpu::DeviceBuffer counters_, stop_;
};

class GpuRankSum : public test::GpuKernelTest<::testing::Test> {
 protected:
  static RankSum load() { return {context->info().sm, *store}; }

  static SumValuesParams sum_params(const World& world, const gpu::DeviceBuffer& send,
                                    const gpu::DeviceBuffer& receive, int64_t count) {
    return {send.data<float>(), receive.data<float>(), count, world.messages()};
  }
};

TEST_F(GpuRankSum, AddsInTheOrderOfTheRanks) {
  const RankSum kernels = load();
  for (const int ranks : {1, 2, 3, 8}) {
    for (const int own : {0, ranks - 1}) {
      for (const int64_t count : {4, 2048, 2052, 8192}) {
        SCOPED_TRACE(testing::Message() << "rank " << own << " of " << ranks << ", " << count);
        const World world(ranks, own, count);
        const auto send = to_device(world.values(own));
        const auto receive = to_device(std::vector<float>(static_cast<size_t>(count), -1));
        const SumValuesParams params = sum_params(world, send, receive, count);
        ASSERT_TRUE(RankSum::serves(params));
        for (const uint32_t epoch : {1u, 2u, 3u}) {
          world.deliver(epoch);
          kernels.sum(params, nullptr);
          EXPECT_EQ(to_host<float>(receive, static_cast<size_t>(count)), world.sum());
          world.expect_sent(epoch);
          EXPECT_EQ(world.counters().epoch, epoch);
          EXPECT_EQ(world.counters().finished, 0u);
        }
        EXPECT_EQ(world.stop(), 0u);
      }
    }
  }
}

// 0 marks words that were never written, and odd and even epochs alternate.
TEST_F(GpuRankSum, EpochsSkipZeroWhenTheyWrap) {
  const RankSum kernels = load();
  World world(2, 0, 16);
  const auto send = to_device(world.values(0));
  const auto receive = to_device(std::vector<float>(16, -1));
  world.set_epoch(~0u);
  world.deliver(2);
  kernels.sum(sum_params(world, send, receive, 16), nullptr);
  EXPECT_EQ(to_host<float>(receive, 16), world.sum());
  EXPECT_EQ(world.counters().epoch, 2u);
}

TEST_F(GpuRankSum, AddsToTheResidualStreamAndNorms) {
  const RankSum kernels = load();
  constexpr int32_t kRows = 3, kDim = 2048;
  constexpr float kFactor = 0.5f, kNormEpsilon = 1e-5f;
  constexpr size_t kCount = size_t{kRows} * kDim;
  World world(3, 1, kCount);
  std::vector<float> x(kCount), weight(kDim);
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (float& value : x) value = normal(random);
  for (float& value : weight) value = normal(random);
  const auto on_gpu = to_device(x), branch = to_device(world.values(1)), w = to_device(weight);
  const auto normed = to_device(std::vector<uint16_t>(kCount, 0));
  SumResidualParams params{};
  params.residual.x = on_gpu.data<float>();
  params.residual.branch = branch.data<float>();
  params.residual.branch_factor = kFactor;
  params.residual.norm = {w.data<float>(), kNormEpsilon, 1};
  params.residual.normed = normed.data();
  params.residual.normed_stride = kDim;
  params.residual.rows = kRows;
  params.residual.dim = kDim;
  params.messages = world.messages();
  ASSERT_TRUE(RankSum::serves(params));
  world.deliver(1);
  kernels.add(params, nullptr);
  const std::vector<float> sum = world.sum();
  const auto got = to_host<float>(on_gpu, kCount);
  const auto got_normed = to_host<uint16_t>(normed, kCount);
  for (size_t row = 0; row < kRows; ++row) {
    double squares = 0;
    for (size_t i = row * kDim; i < (row + 1) * kDim; ++i) {
      ASSERT_FLOAT_EQ(got[i], x[i] + kFactor * sum[i]);
      squares += double{got[i]} * got[i];
    }
    const double factor = 1 / std::sqrt(squares / kDim + kNormEpsilon);
    for (size_t i = row * kDim; i < (row + 1) * kDim; ++i) {
      const double want = got[i] * factor * (1 + double{weight[i % kDim]});
      ASSERT_NEAR(bf16_to_float(got_normed[i]), want, 0.01 * std::fabs(want) + 1e-6) << i;
    }
  }
  world.expect_sent(1);
}

// Words of another message in the same place do not count.
TEST_F(GpuRankSum, StopsWaitingInTime) {
  const RankSum kernels = load();
  const World world(2, 0, 64);
  world.deliver(3);
  const auto send = to_device(world.values(0));
  const auto receive = to_device(std::vector<float>(64, -1));
  kernels.sum(sum_params(world, send, receive, 64), nullptr);
  gpu::synchronize(nullptr);
  EXPECT_EQ(world.stop(), 1u);
}

TEST_F(GpuRankSum, StopsWaitingIfTold) {
  const RankSum kernels = load();
  World world(2, 1, 64);
  world.set_stop();
  const auto send = to_device(world.values(1));
  const auto receive = to_device(std::vector<float>(64, -1));
  SumValuesParams params = sum_params(world, send, receive, 64);
  params.messages.timeout_ns = int64_t{1} << 60;
  kernels.sum(params, nullptr);
  gpu::synchronize(nullptr);
  EXPECT_EQ(world.counters().epoch, 1u);
}

TEST(RankSum, ServesWhatFitsAndIsAligned) {
  alignas(16) float memory[64];
  SumValuesParams params{memory, memory, 16, {}};
  params.messages.capacity = 16;
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
