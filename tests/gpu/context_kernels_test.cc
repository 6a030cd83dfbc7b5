// SPDX-License-Identifier: Apache-2.0
// Exchanges of contexts that are distributed over GPUs, one rank at a time: the messages of the
// others are there before it starts. Skipped without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "core/float_types.h"
#include "gpu/rank_inbox.h"
#include "kernels/cuda/portable/context/launch.h"
#include "support/device_array.h"
#include "support/gpu_kernel_test.h"

namespace fovea::kernels::cuda {
namespace {

using test::Inbox;
using test::index;
using test::to_device;
using test::to_host;

constexpr float kEmpty = -std::numeric_limits<float>::infinity();
constexpr uint16_t kBf16Nan = 0xffff;  // two of them are kNotArrived

class GpuContext : public test::GpuKernelTest<::testing::Test> {
 protected:
  static ContextMail mail(DType dtype = DType::bf16) {
    return {dtype, context->info().sm, context->info().cores, *store};
  }
};

std::vector<uint16_t> random_bf16(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> values(count);
  for (uint16_t& value : values) value = float_to_bf16(normal(random));
  return values;
}

// Returns the words that a receiver gets for these 16-bit values.
std::vector<uint32_t> message_of(const std::vector<uint16_t>& values) {
  std::vector<uint32_t> words(values.size() / 2);
  for (size_t i = 0; i < words.size(); ++i) {
    words[i] = values[2 * i] | uint32_t{values[2 * i + 1]} << 16;
    if (words[i] == kNotArrived) words[i] = kOtherNan;
  }
  return words;
}

// A batch of a permuted order, whose q are views into wider rows, as those of joined projections.
TEST_F(GpuContext, QueriesOfAllRanksArriveInOrder) {
  const ContextMail kernels = mail();
  constexpr int32_t kHeads = 3, kDim = 24, kWide = 128;
  for (const int ranks : {1, 2, 3, 8}) {
    for (const int32_t tokens : {1, 40}) {
      const int own = ranks / 2;
      const size_t count = index(tokens * kHeads * kDim);
      std::vector<std::vector<uint16_t>> q;
      for (int rank = 0; rank < ranks; ++rank) {
        q.push_back(random_bf16(count, static_cast<uint32_t>(100 * ranks + rank)));
        q.back()[0] = q.back()[1] = kBf16Nan;
      }
      std::vector<int32_t> order(index(tokens));
      for (int32_t i = 0; i < tokens; ++i) order[index(i)] = (7 * i + 3) % tokens;
      // Messages are in the order of the rows.
      const auto permuted = [&](const std::vector<uint16_t>& values) {
        std::vector<uint16_t> rows;
        for (const int32_t token : order) {
          const auto first = values.begin() + int64_t{token} * kHeads * kDim;
          rows.insert(rows.end(), first, first + kHeads * kDim);
        }
        return rows;
      };
      std::vector<uint16_t> wide(index(tokens * kWide), kBf16Nan);
      for (int32_t i = 0; i < tokens; ++i) {
        std::copy_n(q[index(own)].begin() + i * kHeads * kDim, kHeads * kDim,
                    wide.begin() + i * kWide);
      }
      const auto own_q = to_device(wide), own_order = to_device(order);
      const Inbox inbox(ranks, own, 4096);
      for (int turn = 0; turn < 2 * kBoxes; ++turn) {
        const auto all = to_device(std::vector<uint16_t>(count * index(ranks), 0));
        for (int rank = 0; rank < ranks; ++rank) {
          if (rank != own) inbox.deliver(turn % kBoxes, rank, message_of(permuted(q[index(rank)])));
        }
        GatherQueriesParams params{};
        params.boxes = inbox.boxes();
        params.rows = {own_order.data<int32_t>(), 0, tokens, kHeads, kDim / 8};
        params.q = {own_q.data(), kWide, kDim};
        params.all = {all.data(), int64_t{ranks} * kHeads * kDim, kDim};
        kernels.gather(params, nullptr);
        std::vector<uint16_t> expected;
        for (int32_t row = 0; row < tokens; ++row) {
          for (int rank = 0; rank < ranks; ++rank) {
            const auto first = q[index(rank)].begin() + int64_t{order[index(row)]} * kHeads * kDim;
            expected.insert(expected.end(), first, first + kHeads * kDim);
            auto* const pair = &expected[expected.size() - kHeads * kDim];
            if (rank != own && pair[0] == kBf16Nan && pair[1] == kBf16Nan) pair[1] = 0x7fff;
          }
        }
        ASSERT_EQ(to_host<uint16_t>(all, expected.size()), expected) << ranks << ", " << turn;
        for (int rank = 0; rank < ranks; ++rank) {
          if (rank == own) continue;
          ASSERT_EQ(inbox.sent(turn % kBoxes, rank, count / 2),
                    message_of(permuted(q[index(own)])));
        }
        EXPECT_EQ(inbox.kept((turn + kBoxes - 1) % kBoxes), 0);
        EXPECT_EQ(inbox.counters().turn, static_cast<uint32_t>((turn + 1) % kBoxes));
        EXPECT_EQ(inbox.counters().finished, 0u);
      }
      EXPECT_EQ(inbox.stop(), 0u);
    }
  }
}

// The states of all ranks for all heads; rows without keys hold NaN.
struct States {
  States(int ranks, int32_t tokens, int32_t all_heads, int32_t dim) : heads(all_heads), width(dim) {
    std::mt19937 random(static_cast<uint32_t>(ranks * 100 + tokens));
    std::normal_distribution<float> normal;
    for (int rank = 0; rank < ranks; ++rank) {
      out.push_back(random_bf16(index(tokens * all_heads * dim), static_cast<uint32_t>(random())));
      lse.emplace_back(index(tokens * all_heads));
      for (int32_t i = 0; i < tokens * all_heads; ++i) {
        lse.back()[index(i)] = 3 * normal(random);
        // Every third row is empty on some ranks, and every ninth on all of them.
        if (i % 9 != 0 && (i % 3 != 0 || (i + rank) % 2 != 0)) continue;
        lse.back()[index(i)] = kEmpty;
        std::fill_n(out.back().begin() + int64_t{i} * dim, dim, kBf16Nan);
      }
    }
  }
  // Returns the words that a rank sends for `count` heads from `first` on.
  std::vector<uint32_t> message(int rank, int32_t first, int32_t count, int32_t tokens) const {
    std::vector<uint16_t> values;
    std::vector<uint32_t> lse_words;
    for (int32_t token = 0; token < tokens; ++token) {
      const int64_t row = int64_t{token} * heads + first;
      const auto from = out[index(rank)].begin() + row * width;
      values.insert(values.end(), from, from + int64_t{count} * width);
      for (int32_t head = 0; head < count; ++head) {
        lse_words.push_back(std::bit_cast<uint32_t>(lse[index(rank)][index(row + head)]));
      }
    }
    std::vector<uint32_t> words = message_of(values);
    words.insert(words.end(), lse_words.begin(), lse_words.end());
    return words;
  }

  int32_t heads, width;
  std::vector<std::vector<uint16_t>> out;
  std::vector<std::vector<float>> lse;
};

// Expects the merged state of a row against sums in fp64.
void expect_merged(const States& states, int64_t row, const uint16_t* out, float lse,
                   const float* sink) {
  double max = kEmpty, sum = 0;
  for (const auto& each : states.lse) max = std::max(max, double{each[index(row)]});
  for (const auto& each : states.lse) {
    if (each[index(row)] != kEmpty) sum += std::exp(each[index(row)] - max);
  }
  if (sum == 0) {
    EXPECT_EQ(lse, kEmpty);
  } else {
    EXPECT_NEAR(lse, max + std::log(sum), 1e-5 * std::max(1.0, std::fabs(max)));
  }
  const double share = sink == nullptr ? 1 : 1 / (1 + std::exp(*sink - (max + std::log(sum))));
  for (int32_t d = 0; d < states.width; ++d) {
    double value = 0;
    for (size_t rank = 0; rank < states.out.size(); ++rank) {
      const float part = states.lse[rank][index(row)];
      if (part == kEmpty) continue;
      value += share * std::exp(part - max) / sum *
               bf16_to_float(states.out[rank][index(row * states.width + d)]);
    }
    ASSERT_NEAR(bf16_to_float(out[d]), value, std::fabs(value) / 250 + 1e-6) << row << ", " << d;
  }
}

TEST_F(GpuContext, StatesOfAllRanksAreMerged) {
  const ContextMail kernels = mail();
  constexpr int32_t kHeads = 3, kDim = 40;
  for (const int ranks : {1, 2, 3, 8}) {
    for (const int32_t tokens : {1, 17}) {
      const int own = ranks - 1;
      const int32_t all_heads = ranks * kHeads;
      const States states(ranks, tokens, all_heads, kDim);
      const std::vector<float> sinks = {-1, 0, 2};
      const auto part = to_device(states.out[index(own)]), lse = to_device(states.lse[index(own)]);
      const auto own_sinks = to_device(sinks);
      std::vector<int32_t> order(index(tokens));
      for (int32_t i = 0; i < tokens; ++i) order[index(i)] = (5 * i + 1) % tokens;
      const auto own_order = to_device(order);
      const Inbox inbox(ranks, own, 4096);
      for (int turn = 0; turn < 2 * kBoxes; ++turn) {
        const auto merged = to_device(std::vector<uint16_t>(index(tokens * kHeads * kDim), 0));
        const auto merged_lse = to_device(std::vector<float>(index(tokens * kHeads), 0));
        for (int rank = 0; rank < ranks; ++rank) {
          if (rank == own) continue;
          inbox.deliver(turn % kBoxes, rank, states.message(rank, own * kHeads, kHeads, tokens));
        }
        MergeContextParams params{};
        params.boxes = inbox.boxes();
        params.rows = {own_order.data<int32_t>(), 0, tokens, kHeads, kDim / 8};
        params.part = {part.data(), int64_t{all_heads} * kDim, kDim};
        params.lse = lse.data<float>();
        params.merged = {merged.data(), int64_t{kHeads} * kDim, kDim};
        params.merged_lse = merged_lse.data<float>();
        params.sinks = turn % 2 == 0 ? nullptr : own_sinks.data<float>();
        kernels.merge(params, nullptr);
        const auto out = to_host<uint16_t>(merged, index(tokens * kHeads * kDim));
        const auto out_lse = to_host<float>(merged_lse, index(tokens * kHeads));
        for (int32_t row = 0; row < tokens; ++row) {
          for (int32_t head = 0; head < kHeads; ++head) {
            const int64_t state = int64_t{order[index(row)]} * kHeads + head;
            expect_merged(states, int64_t{row} * all_heads + own * kHeads + head,
                          &out[index(state * kDim)], out_lse[index(state)],
                          turn % 2 == 0 ? nullptr : &sinks[index(head)]);
          }
        }
        for (int rank = 0; rank < ranks; ++rank) {
          if (rank == own) continue;
          const auto words = states.message(own, rank * kHeads, kHeads, tokens);
          EXPECT_EQ(inbox.sent(turn % kBoxes, rank, words.size()), words);
        }
        EXPECT_EQ(inbox.kept((turn + kBoxes - 1) % kBoxes), 0);
      }
    }
  }
}

// Words of a message that has not arrived whole end the wait in time.
TEST_F(GpuContext, MissingWordsEndTheWait) {
  const ContextMail kernels = mail();
  const Inbox inbox(2, 0, 64);
  std::vector<uint32_t> message(8, 1);
  message[5] = kNotArrived;
  inbox.deliver(0, 1, message);
  const auto q = to_device(std::vector<uint16_t>(16, 0)),
             all = to_device(std::vector<uint16_t>(32));
  GatherQueriesParams params{};
  params.boxes = inbox.boxes();
  params.rows = {nullptr, 0, 1, 1, 2};
  params.q = {q.data(), 16, 16};
  params.all = {all.data(), 32, 16};
  kernels.gather(params, nullptr);
  gpu::synchronize(nullptr);
  EXPECT_EQ(inbox.stop(), 1u);
}

}  // namespace
}  // namespace fovea::kernels::cuda
