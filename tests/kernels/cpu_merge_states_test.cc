// SPDX-License-Identifier: Apache-2.0
// Merging of partial attention: against fp64, and the algebraic laws it must obey.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/cpu/cpu.h"
#include "kernels/merge_states.h"
#include "kernels/reference/reference.h"
#include "support/expect_close.h"
#include "support/isas.h"

namespace fovea::kernels {
namespace {

using test::isas;

constexpr float kEmpty = -std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr double kEpsilon = std::numeric_limits<float>::epsilon();

struct Problem {
  std::vector<float> o, lse, out, out_lse;
  MergeStatesParams params;
};

// Every third part is empty, with NaN as its o.
Problem make_problem(int32_t parts, int64_t rows, int32_t heads, int32_t dim) {
  std::mt19937 generator(static_cast<uint32_t>(parts * 1000 + dim));
  std::uniform_real_distribution<float> uniform(-1, 1);
  Problem problem;
  const int64_t items = rows * heads;
  MergeStatesParams& params = problem.params;
  params.o_part_stride = items * dim + 5;
  params.lse_part_stride = items + 3;
  problem.o.assign(static_cast<size_t>(parts * params.o_part_stride), kNan);
  problem.lse.assign(static_cast<size_t>(parts * params.lse_part_stride), kNan);
  for (int32_t part = 0; part < parts; ++part) {
    for (int64_t item = 0; item < items; ++item) {
      const bool empty = (part + item) % 3 == 2;
      float& lse = problem.lse[static_cast<size_t>(part * params.lse_part_stride + item)];
      lse = empty ? kEmpty : 20 * uniform(generator);
      float* o = &problem.o[static_cast<size_t>(part * params.o_part_stride + item * dim)];
      for (int32_t i = 0; i < dim && !empty; ++i) o[i] = uniform(generator);
    }
  }
  problem.out.assign(static_cast<size_t>(items * dim), kNan);
  problem.out_lse.assign(static_cast<size_t>(items), kNan);
  params.o = problem.o.data();
  params.lse = problem.lse.data();
  params.parts = parts;
  params.rows = rows;
  params.heads = heads;
  params.dim = dim;
  params.out = problem.out.data();
  params.out_lse = problem.out_lse.data();
  return problem;
}

TEST(CpuMergeStates, MatchesReference) {
  for (const cpu::Isa isa : isas()) {
    for (const int32_t parts : {1, 2, 3, 7, 64}) {
      for (const int32_t dim : {1, 16, 64, 131, 512}) {
        Problem expected = make_problem(parts, 5, 3, dim);
        reference::merge_states(expected.params);
        ThreadPool threads(2);
        Problem actual = make_problem(parts, 5, 3, dim);
        cpu::merge_states(actual.params, threads, isa);
        // The terms are at most 1. Each is rounded once, and so is its weight.
        const double error = (4 + std::sqrt(parts)) * kEpsilon;
        for (size_t i = 0; i < actual.out.size(); ++i) {
          ASSERT_TRUE(test::is_near(actual.out[i], expected.out[i], error))
              << "parts " << parts << " at " << i;
        }
        for (size_t i = 0; i < actual.out_lse.size(); ++i) {
          const double scale = std::max(1.0f, std::fabs(expected.out_lse[i]));
          ASSERT_TRUE(test::is_near(actual.out_lse[i], expected.out_lse[i], 4 * kEpsilon * scale));
        }
      }
    }
  }
}

TEST(CpuMergeStates, OnePartIsUnchangedAndNoPartsGiveAnEmptyResult) {
  ThreadPool threads(1);
  Problem one = make_problem(1, 4, 2, 33);
  cpu::merge_states(one.params, threads);
  for (size_t item = 0; item < 8; ++item) {
    const bool empty = one.lse[item] == kEmpty;
    EXPECT_EQ(one.out_lse[item], one.lse[item]);
    for (size_t i = 0; i < 33; ++i) {
      EXPECT_EQ(one.out[item * 33 + i], empty ? 0 : one.o[item * 33 + i]);
    }
  }
  Problem none = make_problem(1, 4, 2, 33);
  none.params.parts = 0;
  cpu::merge_states(none.params, threads);
  EXPECT_EQ(none.out, std::vector<float>(none.out.size(), 0));
  EXPECT_EQ(none.out_lse, std::vector<float>(none.out_lse.size(), kEmpty));
}

// A NaN of any bits in the LSE or in the values of a part that is not empty.
TEST(CpuMergeStates, NanStaysNan) {
  ThreadPool threads(2);
  for (const cpu::Isa isa : isas()) {
    for (const uint32_t bits : {0x7fc00000u, 0xffffffffu, 0x7f800001u}) {
      for (const bool in_lse : {true, false}) {
        const auto spoiled = [&] {
          Problem problem = make_problem(3, 5, 3, 37);
          (in_lse ? problem.lse[4] : problem.o[4 * 37 + 36]) = std::bit_cast<float>(bits);
          return problem;
        };
        Problem expected = spoiled(), actual = spoiled();
        reference::merge_states(expected.params);
        cpu::merge_states(actual.params, threads, isa);
        EXPECT_TRUE(std::isnan(expected.out[4 * 37 + 36]));
        for (size_t i = 0; i < actual.out.size(); ++i) {
          ASSERT_TRUE(test::is_near(actual.out[i], expected.out[i], 8 * kEpsilon)) << i;
        }
        for (size_t i = 0; i < actual.out_lse.size(); ++i) {
          ASSERT_TRUE(test::is_near(actual.out_lse[i], expected.out_lse[i], 160 * kEpsilon)) << i;
        }
      }
    }
  }
}

TEST(CpuMergeStates, InPlaceAndThreadsGiveTheSameBits) {
  ThreadPool one(1), three(3);
  for (const cpu::Isa isa : isas()) {
    Problem apart = make_problem(5, 700, 3, 70);
    cpu::merge_states(apart.params, one, isa);
    Problem in_place = make_problem(5, 700, 3, 70);
    in_place.params.out = in_place.o.data();
    in_place.params.out_lse = in_place.lse.data();
    cpu::merge_states(in_place.params, three, isa);
    EXPECT_EQ(std::memcmp(apart.out.data(), in_place.o.data(), apart.out.size() * 4), 0);
    EXPECT_EQ(std::memcmp(apart.out_lse.data(), in_place.lse.data(), apart.out_lse.size() * 4), 0);
  }
}

// Merging in steps, grouped in any way, gives the result of merging at once.
TEST(CpuMergeStates, IsAssociative) {
  ThreadPool threads(1);
  constexpr int32_t kParts = 9;
  Problem whole = make_problem(kParts, 6, 2, 40);
  cpu::merge_states(whole.params, threads);
  for (const int32_t cut : {1, 4, 8}) {
    Problem parts = make_problem(kParts, 6, 2, 40);
    MergeStatesParams tail = parts.params;
    tail.o += cut * tail.o_part_stride;
    tail.lse += cut * tail.lse_part_stride;
    tail.parts = kParts - cut;
    // Overwrites the tail's first part, which the second step takes as its last part.
    tail.out = parts.o.data() + cut * tail.o_part_stride;
    tail.out_lse = parts.lse.data() + cut * tail.lse_part_stride;
    cpu::merge_states(tail, threads);
    MergeStatesParams head = parts.params;
    head.parts = cut + 1;
    cpu::merge_states(head, threads);
    for (size_t i = 0; i < whole.out.size(); ++i) {
      ASSERT_NEAR(parts.out[i], whole.out[i], 8 * kEpsilon);
    }
    for (size_t i = 0; i < whole.out_lse.size(); ++i) {
      ASSERT_NEAR(parts.out_lse[i], whole.out_lse[i], 8 * kEpsilon * 20);
    }
  }
}

}  // namespace
}  // namespace fovea::kernels
