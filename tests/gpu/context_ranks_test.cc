// SPDX-License-Identifier: Apache-2.0
// Exchanges of distributed contexts by writes into other GPUs' memory. Skipped without a GPU; two
// ranks run on one GPU, too.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "core/float_types.h"
#include "dist/collective_checks.h"
#include "dist/context_links.h"
#include "dist/cuda_context_exchange.h"
#include "dist/run_ranks.h"
#include "gpu/several_gpus.h"
#include "support/device_array.h"

namespace fovea {
namespace {

using test::to_device;
using test::to_host;

// Exchanges of distributed contexts whose kernels run at the same time on these GPUs.
class ConcurrentContexts : public testing::TestWithParam<std::vector<int>> {
 protected:
  void SetUp() override {
    FOVEA_NEEDS_GPUS(1 + *std::ranges::max_element(GetParam()));
    const std::string why = why_no_peers(GetParam());
    if (!why.empty()) GTEST_SKIP() << why;
  }
};

// Rows of one rank: q, and its results for the heads of all ranks with their LSE.
struct RankRows {
  static constexpr int32_t kHeads = 4, kDim = 64;
  RankRows(int rank, int32_t tokens) {
    const auto value = [&](int64_t i) { return test::rank_value(rank, i) / 64; };
    for (int64_t i = 0; i < int64_t{tokens} * kHeads * kDim; ++i) {
      q.push_back(float_to_bf16(value(i)));
    }
    for (int64_t i = 0; i < int64_t{tokens} * 2 * kHeads * kDim; ++i) {
      out.push_back(float_to_bf16(value(i + 7)));
    }
    for (int64_t i = 0; i < int64_t{tokens} * 2 * kHeads; ++i) {
      const bool is_empty = (i + rank) % 3 == 0 || i % 5 == 0;
      lse.push_back(is_empty ? -std::numeric_limits<float>::infinity() : value(3 * i));
      if (is_empty) std::fill_n(out.begin() + i * kDim, kDim, uint16_t{0xffff});
    }
  }
  std::vector<uint16_t> q, out;
  std::vector<float> lse;
};

void expect_exchanged(const std::vector<RankRows>& ranks, int own, int32_t tokens,
                      const std::vector<uint16_t>& all_q, const std::vector<uint16_t>& merged) {
  constexpr int32_t kHeads = RankRows::kHeads, kDim = RankRows::kDim;
  for (int64_t i = 0; i < int64_t{tokens} * 2 * kHeads; ++i) {
    const int64_t token = i / (2 * kHeads), rank = i / kHeads % 2, head = i % kHeads;
    for (int64_t d = 0; d < kDim; ++d) {
      ASSERT_EQ(all_q[static_cast<size_t>(i * kDim + d)],
                ranks[static_cast<size_t>(rank)]
                    .q[static_cast<size_t>((token * kHeads + head) * kDim + d)]);
    }
    if (rank != own) continue;
    double sum = 0;
    for (const RankRows& each : ranks) sum += std::exp(double{each.lse[static_cast<size_t>(i)]});
    for (int64_t d = 0; d < kDim; ++d) {
      double want = 0;
      for (const RankRows& each : ranks) {
        const double weight = std::exp(double{each.lse[static_cast<size_t>(i)]});
        if (weight > 0) {
          want += weight / sum * bf16_to_float(each.out[static_cast<size_t>(i * kDim + d)]);
        }
      }
      ASSERT_NEAR(bf16_to_float(merged[static_cast<size_t>((token * kHeads + head) * kDim + d)]),
                  want, std::fabs(want) / 200 + 1e-6);
    }
  }
}

TEST_P(ConcurrentContexts, ReachAllRanksInAnyOrderOfReplays) {
  constexpr int32_t kHeads = RankRows::kHeads, kDim = RankRows::kDim, kMaxTokens = 300;
  const std::vector<int>& gpus = GetParam();
  // Messages of few bytes, so that many tokens are sent in pieces.
  const auto links = make_context_links(gpus, {.max_bytes = 64 * 1024});
  constexpr int kReplays = 50;
  for (const int32_t tokens : {1, 40, kMaxTokens}) {
    std::vector<RankRows> rows;
    for (int rank = 0; rank < 2; ++rank) rows.emplace_back(rank, tokens);
    std::vector<std::vector<uint16_t>> all(2), merged(2);
    test::run_all_ranks(2, [&](Communicator& host) {
      const auto rank = static_cast<size_t>(host.rank());
      const gpu::Context context(gpus[rank]);
      const gpu::OwnedStream stream;
      CudaContextExchange exchange({.dtype = DType::bf16,
                                    .heads = kHeads,
                                    .q_dim = kDim,
                                    .dim = kDim,
                                    .max_tokens = tokens,
                                    .device = {DeviceKind::cuda, gpus[rank]}},
                                   *links[rank]);
      const auto q = to_device(rows[rank].q), out = to_device(rows[rank].out),
                 lse = to_device(rows[rank].lse);
      const auto all_q = to_device(std::vector<uint16_t>(2 * rows[rank].q.size(), 0));
      const auto result = to_device(std::vector<uint16_t>(rows[rank].q.size(), 0));
      gpu::synchronize(nullptr);
      const gpu::Graph graph = gpu::Graph::capture(stream.get(), [&](Stream captured) {
        exchange.gather_queries(dense_rows(q.data(), DType::bf16, kHeads, kDim),
                                dense_rows(all_q.data(), DType::bf16, 2 * kHeads, kDim), tokens,
                                captured);
        exchange.merge(
            {dense_rows(out.data(), DType::bf16, 2 * kHeads, kDim), NaturalLse(lse.data<float>())},
            {dense_rows(result.data(), DType::bf16, kHeads, kDim), {}}, tokens, nullptr, captured);
      });
      host.barrier();
      for (int replay = 0; replay < kReplays; ++replay) graph.launch(stream.get());
      gpu::synchronize(stream.get());
      all[rank] = to_host<uint16_t>(all_q, 2 * rows[rank].q.size());
      merged[rank] = to_host<uint16_t>(result, rows[rank].q.size());
      host.barrier();  // nobody frees while others run
    });
    for (int rank = 0; rank < 2; ++rank) {
      const auto own = static_cast<size_t>(rank);
      links[own]->check();
      expect_exchanged(rows, rank, tokens, all[own], merged[own]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(OneGpu, ConcurrentContexts, testing::Values(std::vector<int>{0, 0}));
INSTANTIATE_TEST_SUITE_P(TwoGpus, ConcurrentContexts, testing::Values(std::vector<int>{0, 1}));

}  // namespace
}  // namespace fovea
