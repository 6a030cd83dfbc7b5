// SPDX-License-Identifier: Apache-2.0
// The fast recurrences against fp64, and bit for bit against themselves: in pieces, token by token,
// alone, and with several threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "linear_operations.h"
#include "support/expect_close.h"
#include "support/isas.h"

namespace fovea::kernels {
namespace {

using test::isas;

struct Result {
  std::vector<float> out;     // [tokens, ...]
  std::vector<float> states;  // [slots, ...]
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void expect_close(const std::vector<float>& actual, const std::vector<float>& expected,
                  double error, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_TRUE(test::is_near(actual[i], expected[i], error * (1 + std::fabs(expected[i]))))
        << what << " at " << i;
  }
}

Result run_batch(const Operation& operation, const Batch& batch, int team, cpu::Isa isa) {
  Result result;
  result.states = make_states(batch, operation.state_size(), operation.state_stride());
  result.out.assign(static_cast<size_t>(batch.tokens() * operation.out_size()), kNan);
  operation.run(batch, 0, result.states.data(), result.out.data(), team, isa);
  return result;
}

TEST(CpuLinearAttention, MatchesReference) {
  const Batch batch = mixed_batch();
  for (const auto& operation : operations()) {
    Result expected;
    expected.states = make_states(batch, operation->state_size(), operation->state_stride());
    expected.out.assign(static_cast<size_t>(batch.tokens() * operation->out_size()), kNan);
    operation->run_reference(batch, 0, expected.states.data(), expected.out.data());
    for (const cpu::Isa isa : isas()) {
      const Result actual = run_batch(*operation, batch, 2, isa);
      const std::string what = operation->name() + " on " + std::string(cpu::isa_name(isa));
      // f32 sums over up to 128 keys, and a state that carries earlier roundings forward.
      expect_close(actual.out, expected.out, 4e-6, what);
      expect_close(actual.states, expected.states, 4e-6, what + ", state");
    }
  }
}

// A NaN of any bits in any input gives NaN where the reference has NaN, and nowhere else.
TEST(CpuLinearAttention, NanStaysNan) {
  constexpr uint32_t kNans[] = {0x7fc00000, 0xffffffff, 0x7f800001};
  const Batch batch = mixed_batch();
  size_t nan = 0;
  for (const auto& operation : operations()) {
    for (std::vector<float>* input : operation->inputs()) {
      for (const size_t at : {size_t{0}, input->size() / 3}) {
        if (at >= input->size()) continue;
        const float old = (*input)[at];
        (*input)[at] = std::bit_cast<float>(kNans[nan++ % std::size(kNans)]);
        Result expected;
        expected.states = make_states(batch, operation->state_size(), operation->state_stride());
        expected.out.assign(static_cast<size_t>(batch.tokens() * operation->out_size()), kNan);
        operation->run_reference(batch, 0, expected.states.data(), expected.out.data());
        const auto own = expected.out.begin() + batch.requests[0].q_len * operation->out_size();
        if (at == 0) {
          EXPECT_TRUE(
              std::any_of(expected.out.begin(), own, [](float x) { return std::isnan(x); }));
        }
        for (const cpu::Isa isa : isas()) {
          const Result actual = run_batch(*operation, batch, 2, isa);
          const std::string what = operation->name() + " on " + std::string(cpu::isa_name(isa));
          expect_close(actual.out, expected.out, 4e-6, what);
          expect_close(actual.states, expected.states, 4e-6, what + ", state");
        }
        (*input)[at] = old;
      }
    }
  }
}

TEST(CpuLinearAttention, ThreadsDoNotChangeBits) {
  const Batch batch = mixed_batch();
  for (const auto& operation : operations()) {
    for (const cpu::Isa isa : isas()) {
      const Result one = run_batch(*operation, batch, 1, isa);
      const Result five = run_batch(*operation, batch, 5, isa);
      EXPECT_TRUE(same_bits(one.out, five.out)) << operation->name();
      EXPECT_TRUE(same_bits(one.states, five.states)) << operation->name();
    }
  }
}

// A prompt in pieces of any size gives the outputs and the state of the whole prompt.
TEST(CpuLinearAttention, ChunkingDoesNotChangeBits) {
  constexpr int32_t kPrompt = 75;
  for (const auto& operation : operations()) {
    if (operation->in_chunks()) continue;
    for (const cpu::Isa isa : isas()) {
      const Result whole = run_batch(*operation, Batch({{kPrompt, 0, 4}}), 1, isa);
      for (const int32_t chunk : {1, 2, 31, 32, 64}) {
        Result pieces;
        pieces.states = make_states(Batch({}), operation->state_size(), operation->state_stride());
        pieces.out.assign(whole.out.size(), kNan);
        for (int32_t begin = 0; begin < kPrompt; begin += chunk) {
          const Batch piece({{std::min(chunk, kPrompt - begin), begin, 4}});
          operation->run(piece, begin, pieces.states.data(),
                         pieces.out.data() + begin * operation->out_size(), 2, isa);
        }
        EXPECT_TRUE(same_bits(whole.out, pieces.out)) << operation->name() << " by " << chunk;
        EXPECT_TRUE(same_bits(whole.states, pieces.states)) << operation->name() << " by " << chunk;
      }
    }
  }
}

// Every request of a batch gives the results that it gives alone.
TEST(CpuLinearAttention, OtherRequestsDoNotChangeBits) {
  const Batch batch = mixed_batch();
  for (const auto& operation : operations()) {
    const Result together = run_batch(*operation, batch, 2, cpu::best_isa());
    std::vector<float> states =
        make_states(batch, operation->state_size(), operation->state_stride());
    std::vector<float> out(together.out.size(), kNan);
    for (size_t i = 0; i < batch.requests.size(); ++i) {
      const int64_t first = batch.q_indptr[i];
      operation->run(Batch({batch.requests[i]}), first, states.data(),
                     out.data() + first * operation->out_size(), 1, cpu::best_isa());
    }
    EXPECT_TRUE(same_bits(together.out, out)) << operation->name();
    EXPECT_TRUE(same_bits(together.states, states)) << operation->name();
  }
}

TEST(CpuLinearAttention, NoRequestsIsNoWork) {
  const Batch empty({});
  for (const auto& operation : operations()) {
    operation->run(empty, 0, nullptr, nullptr, 2, cpu::best_isa());
  }
}

}  // namespace
}  // namespace fovea::kernels
