// SPDX-License-Identifier: Apache-2.0
// ContextExchange and the backend over it: empty parts, idle ranks, and arguments.
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

// A backend that the tests below never run.
class NoBackend final : public AttentionBackend {
 public:
  std::string_view name() const override { return "none"; }
  size_t workspace_bytes(const BatchLimits&) const override { return 0; }
  void reserve(const BatchLimits&, std::span<std::byte>) override {}
  void plan(const BatchView&, Stream) override { ++plans; }
  void forward(const LayerTensors&, Stream) override {}
  int plans = 0;
};

TEST(ContextBackend, NamesTheArgument) {
  const auto self = make_self_communicator();
  ThreadPool threads(1);
  ContextBackendOptions options;
  options.spec = {.q_heads = 2, .kv_heads = 1, .head_dim = 8, .head_dim_v = 8, .needs_lse = true};
  options.page_size = 4;
  const auto refuse = [&](std::string_view part, auto change) {
    ContextBackendOptions changed = options;
    change(changed);
    expect_invalid(part, [&] {
      (void)make_context_backend(std::make_unique<NoBackend>(), changed, *self, threads);
    });
  };
  refuse("shards.ranks is 2, the communicator has 1", [](auto& o) { o.shards.ranks = 2; });
  refuse("spec: window", [](auto& o) { o.spec.window = 3; });
  refuse("needs_lse is false", [](auto& o) { o.spec.needs_lse = false; });
  refuse("has_sinks is true", [](auto& o) { o.spec.scores.has_sinks = true; });
  refuse("q_heads is 0", [](auto& o) { o.spec.q_heads = 0; });
  refuse("interleave is 3, must divide page_size, 4", [](auto& o) { o.shards.interleave = 3; });
  expect_invalid("local is null",
                 [&] { (void)make_context_backend(nullptr, options, *self, threads); });

  auto owned = std::make_unique<NoBackend>();
  NoBackend& local = *owned;
  const auto backend = make_context_backend(std::move(owned), options, *self, threads);
  EXPECT_EQ(backend->name(), "context(none)");
  expect_invalid("plan() before reserve()", [&] { backend->plan({}); });
  backend->reserve({.max_requests = 1, .max_tokens = 2, .max_q_len = 2, .max_kv_len = 8});
  expect_invalid("forward() without a plan", [&] { backend->forward({}); });
  const std::vector<int32_t> indptr = {0, 2}, lens = {9}, rows = {0}, pages = {1, 2};
  BatchView batch{.mode = ForwardMode::extend, .requests = 1, .tokens = 2};
  batch.q_indptr = indptr;
  batch.kv_lens = lens;
  batch.request_rows = rows;
  batch.table = {.entries = pages.data(), .stride = 2, .entry_tokens = 4, .rows = 1};
  expect_invalid("kv_lens[0] is 9, at most 8", [&] { backend->plan(batch); });
  const std::vector<int32_t> fits = {8}, wrong_row = {1};
  batch.kv_lens = fits;
  batch.request_rows = wrong_row;
  expect_invalid("request_rows[0] is 1, must be in [0, 1)", [&] { backend->plan(batch); });
  batch.request_rows = rows;
  batch.requests = 2;
  expect_invalid("requests is 2, must be in [0, 1]", [&] { backend->plan(batch); });
  batch.requests = 1;
  batch.table.stride = 1;
  expect_invalid("kv_lens[0] is 8, a row of table has 4 tokens", [&] { backend->plan(batch); });
  EXPECT_EQ(local.plans, 0);
  batch.table.stride = 2;
  backend->plan(batch);
  EXPECT_EQ(local.plans, 1);
}

}  // namespace
}  // namespace fovea
