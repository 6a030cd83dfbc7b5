// SPDX-License-Identifier: Apache-2.0
// ContextExchange: empty parts, idle ranks, and arguments.
#include <gtest/gtest.h>

#include <limits>
#include <string_view>
#include <vector>

#include "dist/run_ranks.h"
#include "fovea/context_parallel.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using test::expect_invalid;

// Outputs of rows without keys are NaN here, as forward() of other libraries may leave them.
TEST(ContextExchange, EmptyPartsAreTheIdentity) {
  constexpr float kEmpty = -std::numeric_limits<float>::infinity();
  for (const ContextMerge merge : {ContextMerge::all_to_all, ContextMerge::gather_scatter}) {
    test::run_all_ranks(3, [&](Communicator& ranks) {
      ThreadPool threads(1);
      const auto exchange = make_context_exchange(
          {.dtype = DType::bf16, .heads = 1, .q_dim = 2, .dim = 2, .max_tokens = 2, .merge = merge},
          ranks, threads);
      // Token 0 has keys on rank 2 only, token 1 nowhere.
      const bool is_full = ranks.rank() == 2;
      std::vector<uint16_t> out(12, 0x7fc0), merged(4, 0x7fc0);
      std::vector<float> lse(6, kEmpty), merged_lse(2);
      for (size_t i = 0; is_full && i < 6; ++i) out[i] = static_cast<uint16_t>(0x3f80 + i);
      for (size_t i = 0; is_full && i < 3; ++i) lse[i] = 1 + static_cast<float>(i);
      exchange->merge({dense_rows(out.data(), DType::bf16, 3, 2), NaturalLse(lse.data())},
                      {dense_rows(merged.data(), DType::bf16, 1, 2), NaturalLse(merged_lse.data())},
                      2);
      const auto first = static_cast<uint16_t>(0x3f80 + 2 * ranks.rank());
      EXPECT_EQ(merged, (std::vector<uint16_t>{first, static_cast<uint16_t>(first + 1), 0, 0}));
      EXPECT_FLOAT_EQ(merged_lse[0], 1 + static_cast<float>(ranks.rank()));
      EXPECT_EQ(merged_lse[1], kEmpty);
      exchange->merge({}, {}, 0);  // idle ranks keep the pattern
    });
  }
}

TEST(ContextExchange, NamesTheArgument) {
  const auto self = make_self_communicator();
  ThreadPool threads(1);
  const ContextExchangeShape good{.heads = 1, .q_dim = 4, .dim = 4, .max_tokens = 2};
  const auto refuse = [&](std::string_view part, auto change) {
    ContextExchangeShape shape = good;
    change(shape);
    expect_invalid(part, [&] { make_context_exchange(shape, *self, threads); });
  };
  refuse("heads is 0", [](auto& shape) { shape.heads = 0; });
  refuse("q_dim is -1", [](auto& shape) { shape.q_dim = -1; });
  refuse("dim is 0", [](auto& shape) { shape.dim = 0; });
  refuse("max_tokens is 0", [](auto& shape) { shape.max_tokens = 0; });
  refuse("dtype is int32", [](auto& shape) { shape.dtype = DType::i32; });
  refuse("merge is ContextMerge(9)", [](auto& shape) { shape.merge = ContextMerge{9}; });
  const auto exchange = make_context_exchange(good, *self, threads);
  float rows[8] = {}, lse[2] = {};
  const HeadRows four = dense_rows(rows, DType::f32, 1, 4);
  expect_invalid("tokens is 3, must be in [0, 2]",
                 [&] { exchange->gather_queries(four, four, 3); });
  expect_invalid("all is absent", [&] { exchange->gather_queries(four, {}, 1); });
  expect_invalid("q is bf16, must be fp32",
                 [&] { exchange->gather_queries(dense_rows(rows, DType::bf16, 1, 4), four, 1); });
  expect_invalid("part.lse is absent", [&] { exchange->merge({four, {}}, {four, {}}, 1); });
  expect_invalid("merged.out is absent", [&] { exchange->merge({four, NaturalLse(lse)}, {}, 1); });
}

}  // namespace
}  // namespace fovea
