// SPDX-License-Identifier: Apache-2.0
// Attention with the context on 1 to 8 ranks gives the result of one rank: decode, several tokens
// of a request, prompts in two parts, latents, sinks, both ways to merge.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>

#include "dist/context_problem.h"
#include "dist/run_ranks.h"
#include "fovea/select_backend.h"

namespace fovea {
namespace {

using test::Data;
using test::kDim;
using test::kHeads;
using test::Kind;
using test::kPageSize;
using test::Problem;
using test::RankCache;
using test::State;

constexpr double kTolerance = 1e-6;

BatchLimits limits_of(const Problem& problem) {
  BatchLimits limits;
  limits.max_requests = std::max(problem.tokens(), problem.requests());
  limits.max_tokens = problem.tokens();
  limits.max_q_len = std::ranges::max(problem.q_lens);
  // Rank 0 has the most tokens of a request.
  limits.max_kv_len = static_cast<int32_t>(problem.shards.local_length(problem.max_kv(), 0));
  limits.max_encoder_len = limits.max_kv_len;
  return limits;
}

std::unique_ptr<AttentionBackend> make_backend(const std::string& name, const Problem& problem,
                                               const AttentionSpec& spec, KvPool* pool,
                                               ThreadPool& threads) {
  static const BackendRegistry registry = BackendRegistry::builtin();
  BackendRequest request{spec, {}, limits_of(problem), cpu_device()};
  if (pool != nullptr) request.cache = pool->spec();
  const Selection selection = select_backend(registry, request, {Policy::require, name});
  auto backend = selection.chosen->create({.spec = spec, .kv = pool, .threads = &threads});
  backend->reserve(request.limits);
  return backend;
}

// The rank's own heads of q.
std::vector<float> own_queries(const Problem& problem, const Data& data, int rank) {
  const auto dim = static_cast<size_t>(problem.q_dim());
  std::vector<float> own;
  for (int32_t token = 0; token < problem.tokens(); ++token) {
    const auto first =
        (static_cast<size_t>(token * problem.all_heads()) + static_cast<size_t>(rank) * kHeads) *
        dim;
    own.insert(own.end(), data.q.begin() + static_cast<int64_t>(first),
               data.q.begin() + static_cast<int64_t>(first + kHeads * dim));
  }
  return own;
}

// One layer on one rank: returns the state of its own heads over all keys.
State attend(const std::string& backend_name, const Problem& problem, const Data& data,
             Communicator& ranks) {
  ThreadPool threads(1);
  const int32_t tokens = problem.tokens(), rank = ranks.rank();
  RankCache cache(problem, data, rank);
  const auto exchange = make_context_exchange({.heads = kHeads,
                                               .q_dim = problem.q_dim(),
                                               .dim = problem.out_dim(),
                                               .max_tokens = tokens,
                                               .merge = problem.merge},
                                              ranks, threads);
  std::vector<float> own = own_queries(problem, data, rank), all(data.q.size());
  exchange->gather_queries(dense_rows(own.data(), DType::f32, kHeads, problem.q_dim()),
                           dense_rows(all.data(), DType::f32, problem.all_heads(), problem.q_dim()),
                           tokens);
  EXPECT_EQ(all, data.q);

  const auto backend =
      make_backend(backend_name, problem, problem.spec(problem.all_heads()), cache.pool(), threads);
  State part(tokens, problem.all_heads(), problem.out_dim());
  LayerTensors layer;
  layer.q = dense_rows(all.data(), DType::f32, problem.all_heads(), problem.q_dim());
  layer.out = part.view().out;
  layer.lse = part.view().lse;
  cache.set_new_keys(layer);
  backend->plan(cache.rows_batch(), nullptr);
  backend->forward(layer, nullptr);

  State merged(tokens, kHeads, problem.out_dim());
  exchange->merge(part.view(), merged.view(), tokens,
                  problem.has_sinks ? data.sinks.data() + rank * kHeads : nullptr);
  return merged;
}

// A prompt on one rank: the old tokens of all ranks without order, the new ones among themselves.
State attend_in_two_parts(const std::string& backend_name, const Problem& problem, const Data& data,
                          Communicator& ranks) {
  ThreadPool threads(1);
  const int32_t tokens = problem.tokens();
  RankCache cache(problem, data, ranks.rank());
  std::vector<float> own = own_queries(problem, data, ranks.rank()), all = data.q;
  State part(tokens, problem.all_heads(), kDim), old(tokens, kHeads, kDim),
      fresh(tokens, kHeads, kDim);

  AttentionSpec spec = problem.spec(problem.all_heads());
  spec.scope = AttentionScope::cross;
  const auto context = make_backend(backend_name, problem, spec, cache.pool(), threads);
  LayerTensors layer;
  layer.q = dense_rows(all.data(), DType::f32, problem.all_heads(), kDim);
  layer.out = part.view().out;
  layer.lse = part.view().lse;
  context->plan(cache.context_batch(), nullptr);
  context->forward(layer, nullptr);
  const auto exchange = make_context_exchange(
      {.heads = kHeads, .q_dim = kDim, .dim = kDim, .max_tokens = tokens, .merge = problem.merge},
      ranks, threads);
  exchange->merge(part.view(), old.view(), tokens);

  spec = problem.spec(kHeads);
  spec.scope = AttentionScope::ragged;
  const auto among_new = make_backend(backend_name, problem, spec, nullptr, threads);
  layer = {};
  layer.q = dense_rows(own.data(), DType::f32, kHeads, kDim);
  layer.out = fresh.view().out;
  layer.lse = fresh.view().lse;
  cache.set_new_keys(layer);
  among_new->plan(cache.context_batch(), nullptr);
  among_new->forward(layer, nullptr);
  make_state_merger({DType::f32, kHeads, kDim}, {}, &threads)
      ->merge(old.view(), fresh.view(), tokens);
  return old;
}

// One rank with all heads, by the oracle.
State expected_state(const Problem& problem, const Data& data) {
  Problem whole = problem;
  whole.shards = {};
  ThreadPool threads(2);
  RankCache cache(whole, data, 0);
  AttentionSpec spec = problem.spec(problem.all_heads());
  spec.scores.has_sinks = problem.has_sinks;
  const auto backend = make_backend("reference", whole, spec, cache.pool(), threads);
  State state(problem.tokens(), problem.all_heads(), problem.out_dim());
  std::vector<float> q = data.q;
  LayerTensors layer;
  layer.q = dense_rows(q.data(), DType::f32, problem.all_heads(), problem.q_dim());
  layer.out = state.view().out;
  layer.lse = state.view().lse;
  if (problem.has_sinks) layer.scores.sinks = data.sinks.data();
  cache.set_new_keys(layer);
  backend->plan(cache.rows_batch(), nullptr);
  backend->forward(layer, nullptr);
  return state;
}

void expect_own_part(const Problem& problem, const State& expected, const State& got, int rank) {
  const int64_t dim = problem.out_dim();
  for (int64_t row = 0; row < problem.tokens() * kHeads; ++row) {
    const int64_t whole = row / kHeads * problem.all_heads() + rank * kHeads + row % kHeads;
    const float lse = got.lse[static_cast<size_t>(row)];
    const float want = expected.lse[static_cast<size_t>(whole)];
    if (std::isinf(want)) {
      EXPECT_EQ(lse, want);
    } else {
      EXPECT_NEAR(lse, want, kTolerance * std::max(1.0f, std::fabs(want)));
    }
    for (int64_t d = 0; d < dim; ++d) {
      ASSERT_NEAR(got.out[static_cast<size_t>(row * dim + d)],
                  expected.out[static_cast<size_t>(whole * dim + d)], kTolerance)
          << "row " << row << ", dim " << d << ", rank " << rank << " of " << problem.shards.ranks
          << ", interleave " << problem.shards.interleave;
    }
  }
}

using Attend = State (*)(const std::string&, const Problem&, const Data&, Communicator&);

void expect_one_ranks_result(const Problem& problem, const std::string& backend, Attend attend_on,
                             const ThreadCommunicatorOptions& options = {}) {
  const Data data(problem);
  const State expected = expected_state(problem, data);
  test::run_all_ranks(
      problem.shards.ranks,
      [&](Communicator& ranks) {
        expect_own_part(problem, expected, attend_on(backend, problem, data, ranks), ranks.rank());
      },
      options);
}

// Lengths 0 ... 3 N, 257 and 4097, each with `new_tokens` of them new.
Problem all_lengths(int32_t ranks, int32_t interleave, int32_t new_tokens) {
  Problem problem;
  problem.shards = {ranks, interleave};
  for (int32_t length = 0; length <= 3 * ranks; ++length) problem.kv_lens.push_back(length);
  problem.kv_lens.push_back(257);
  problem.kv_lens.push_back(4097);
  for (const int32_t length : problem.kv_lens) {
    problem.q_lens.push_back(std::min(length, new_tokens));
  }
  return problem;
}

class AllRanks : public testing::TestWithParam<int32_t> {};

TEST_P(AllRanks, DecodeAndVerificationGiveOneRanksResult) {
  for (const int32_t interleave : {1, 2, kPageSize}) {
    for (const int32_t new_tokens : {1, 5}) {
      for (const ContextMerge merge : {ContextMerge::all_to_all, ContextMerge::gather_scatter}) {
        Problem problem = all_lengths(GetParam(), interleave, new_tokens);
        problem.merge = merge;
        problem.has_sinks = new_tokens == 5;
        expect_one_ranks_result(problem, "reference", attend);
        expect_one_ranks_result(problem, "cpu", attend);
      }
    }
  }
}

TEST_P(AllRanks, LatentsGiveOneRanksResult) {
  for (const int32_t interleave : {1, 2, kPageSize}) {
    for (const ContextMerge merge : {ContextMerge::all_to_all, ContextMerge::gather_scatter}) {
      Problem problem = all_lengths(GetParam(), interleave, 3);
      problem.kind = Kind::mla;
      problem.merge = merge;
      expect_one_ranks_result(problem, "reference", attend);
    }
  }
}

TEST_P(AllRanks, PromptsInTwoPartsGiveOneRanksResult) {
  for (const int32_t interleave : {1, kPageSize}) {
    for (const std::string backend : {"reference", "cpu"}) {
      Problem problem = all_lengths(GetParam(), interleave, 21);
      expect_one_ranks_result(problem, backend, attend_in_two_parts);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, AllRanks, testing::Range(1, 9));

TEST(ContextAttention, BitsDoNotDependOnTheOrderOfArrival) {
  for (const ContextMerge merge : {ContextMerge::all_to_all, ContextMerge::gather_scatter}) {
    Problem problem = all_lengths(5, 2, 2);
    problem.merge = merge;
    const Data data(problem);
    std::vector<std::vector<float>> first(5);
    for (uint32_t seed = 0; seed < 4; ++seed) {
      ThreadCommunicatorOptions options;
      options.arrive = [seed](int rank, int64_t call) {
        std::minstd_rand random(seed * 977u + static_cast<uint32_t>(rank * 31 + call) + 1);
        random.discard(2);
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
      };
      test::run_all_ranks(
          5,
          [&](Communicator& ranks) {
            const State state = attend("cpu", problem, data, ranks);
            std::vector<float>& known = first[static_cast<size_t>(ranks.rank())];
            if (seed == 0) known = state.out;
            EXPECT_EQ(known, state.out);
          },
          options);
    }
  }
}

}  // namespace
}  // namespace fovea
