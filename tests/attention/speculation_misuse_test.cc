// SPDX-License-Identifier: Apache-2.0
// Wrong arguments of Speculation are errors that name the argument, its value and the limit.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "fovea/speculation.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using test::expect_invalid;

// Valid arguments of every call, for two requests of three nodes.
struct Arguments {
  std::vector<int32_t> tokens = {5, 1, 2, 5, 3, 4}, parents = {-1, 0, 0, -1, 0, 1}, lens = {4, 0};
  std::vector<int32_t> entries = std::vector<int32_t>(20, 1), rows = {1, 0};
  std::vector<uint64_t> ancestors = std::vector<uint64_t>(6), seeds = {1, 2};
  std::vector<int32_t> positions = std::vector<int32_t>(6), child = positions, sibling = positions;
  std::vector<int64_t> slots = {4, 5, 6, 7, -1, 8};
  std::vector<int32_t> indptr = {0, 0, 0}, kv_lens = {7, 3};
  std::vector<int32_t> target = {1, 1, 1, 1, 1, 1};
  std::vector<float> p = std::vector<float>(48, 0.125f), q = p;
  std::vector<int32_t> counts = {2, 1}, nodes = {0, 2, -1, 0, -1, -1}, text = positions,
                       bonus = {0, 0};
  std::vector<int32_t> states = {1, 2}, snapshots = {3, 4, 5, 6, 7, 8};

  Drafts drafts{2, 3, tokens, parents, lens};
  DraftPlaces places{{entries.data(), 10, 1, 2}, rows};
  DraftArrays arrays{ancestors, positions, child, sibling, slots, indptr, kv_lens};
  TargetTokens chosen{target};
  TargetProbabilities probabilities{8, 8, p, q, seeds};
  AcceptedDrafts accepted{counts, nodes, text, bonus};
  CommittedArrays committed{lens, states, snapshots};
};

enum class Call { describe, accept, accept_sampled, commit };

struct Misuse {
  Call call;
  const char* message;
  std::function<void(Arguments&)> spoil;
};

std::vector<Misuse> misuses_of_describe() {
  constexpr int32_t kFar = std::numeric_limits<int32_t>::max();
  return {
      {Call::describe, "drafts.requests is 3, must be in [0, 2]",
       [](auto& a) { a.drafts.requests = 3; }},
      {Call::accept, "drafts.requests is -1", [](auto& a) { a.drafts.requests = -1; }},
      {Call::accept_sampled, "drafts.width is 0, must be in [1, 3]",
       [](auto& a) { a.drafts.width = 0; }},
      {Call::commit, "drafts.width is 4, must be in [1, 3]", [](auto& a) { a.drafts.width = 4; }},
      {Call::describe, "drafts.parents has 5 elements, the drafts need 6",
       [](auto& a) { a.drafts.parents = a.drafts.parents.first(5); }},
      {Call::describe, "drafts.lens has 1 elements, the drafts need 2",
       [](auto& a) { a.drafts.lens = a.drafts.lens.first(1); }},
      {Call::describe, "drafts.lens[1] is -2, must be in [-1, ", [](auto& a) { a.lens[1] = -2; }},
      {Call::describe, "drafts.lens[0] is 2147483647", [](auto& a) { a.lens[0] = kFar; }},
      {Call::describe, "drafts.parents[1, 2] is 2, must be in [-1, 2)",
       [](auto& a) { a.parents[5] = 2; }},
      {Call::describe, "drafts.parents[0, 1] is -2", [](auto& a) { a.parents[1] = -2; }},
      {Call::describe, "arrays.ancestors has 5 elements, the drafts need 6",
       [](auto& a) { a.ancestors.resize(5), a.arrays.ancestors = a.ancestors; }},
      {Call::describe, "arrays.positions has 1 elements",
       [](auto& a) { a.arrays.positions = a.arrays.positions.first(1); }},
      {Call::describe, "arrays.first_child has 1 elements",
       [](auto& a) { a.arrays.first_child = a.arrays.first_child.first(1); }},
      {Call::describe, "arrays.next_sibling has 1 elements",
       [](auto& a) { a.arrays.next_sibling = a.arrays.next_sibling.first(1); }},
      {Call::describe, "arrays.q_indptr has 2 elements, the drafts need 3",
       [](auto& a) { a.arrays.q_indptr = a.arrays.q_indptr.first(2); }},
      {Call::describe, "arrays.kv_lens has 1 elements",
       [](auto& a) { a.arrays.kv_lens = a.arrays.kv_lens.first(1); }},
      {Call::describe, "places.table is absent", [](auto& a) { a.places.table = {}; }},
      {Call::describe, "places.table has 2 rows of 0 entries",
       [](auto& a) { a.places.table.stride = 0; }},
      {Call::describe, "places.request_rows has 1 elements",
       [](auto& a) { a.places.request_rows = a.places.request_rows.first(1); }},
      {Call::describe, "places.request_rows[0] is 2, must be in [0, 2)",
       [](auto& a) { a.rows[0] = 2; }},
      {Call::describe, "request 0: its drafts end at token 11, its row of places.table has 10",
       [](auto& a) { a.lens[0] = 8; }},
  };
}

std::vector<Misuse> misuses_of_results() {
  return {
      {Call::accept, "drafts.tokens has 5 elements",
       [](auto& a) { a.drafts.tokens = a.drafts.tokens.first(5); }},
      {Call::accept, "target.tokens has 0 elements", [](auto& a) { a.chosen.tokens = {}; }},
      {Call::accept, "accepted.counts has 1 elements",
       [](auto& a) { a.accepted.counts = a.accepted.counts.first(1); }},
      {Call::accept, "accepted.nodes has 1 elements",
       [](auto& a) { a.accepted.nodes = a.accepted.nodes.first(1); }},
      {Call::accept, "accepted.tokens has 1 elements",
       [](auto& a) { a.accepted.tokens = a.accepted.tokens.first(1); }},
      {Call::accept, "accepted.bonus has 1 elements",
       [](auto& a) { a.accepted.bonus = a.accepted.bonus.first(1); }},
      {Call::accept_sampled, "target.vocabulary is 0, must be positive",
       [](auto& a) { a.probabilities.vocabulary = 0; }},
      {Call::accept_sampled, "target.row_stride is 7, must be at least the vocabulary of 8",
       [](auto& a) { a.probabilities.row_stride = 7; }},
      {Call::accept_sampled, "target.target has 47 elements, the drafts need 48",
       [](auto& a) { a.probabilities.target = a.probabilities.target.first(47); }},
      {Call::accept_sampled, "target.draft has 47 elements",
       [](auto& a) { a.probabilities.draft = a.probabilities.draft.first(47); }},
      {Call::accept_sampled, "target.seeds has 1 elements",
       [](auto& a) { a.probabilities.seeds = a.probabilities.seeds.first(1); }},
      {Call::accept_sampled, "drafts.tokens[1, 2] is 8, must be in [0, 8), the vocabulary",
       [](auto& a) { a.tokens[5] = 8; }},
      {Call::commit, "arrays.out_slots has 5 elements",
       [](auto& a) { a.arrays.out_slots = a.arrays.out_slots.first(5); }},
      {Call::commit, "accepted.nodes has 0 elements", [](auto& a) { a.accepted.nodes = {}; }},
      {Call::commit, "accepted.counts has 0 elements", [](auto& a) { a.accepted.counts = {}; }},
      {Call::commit, "accepted.counts[0] is 4, must be in [0, 3]",
       [](auto& a) { a.counts[0] = 4; }},
      {Call::commit, "accepted.nodes[0, 1] is 0, must be in [1, 3): nodes ascend",
       [](auto& a) { a.nodes[1] = 0; }},
      {Call::commit, "accepted.nodes[0, 1] is 3", [](auto& a) { a.nodes[1] = 3; }},
      {Call::commit, "arrays.out_slots[1, 0] is 40, must be in [-1, 40)",
       [](auto& a) { a.slots[3] = 40; }},
      {Call::commit, "arrays.kv_lens has 0 elements", [](auto& a) { a.arrays.kv_lens = {}; }},
      {Call::commit, "committed.lens has 1 elements",
       [](auto& a) { a.committed.lens = a.committed.lens.first(1); }},
      {Call::commit, "committed.state_slots has 2 elements and committed.snapshot_slots 0",
       [](auto& a) { a.committed.snapshot_slots = {}; }},
      {Call::commit, "committed.snapshot_slots has 5 elements",
       [](auto& a) { a.committed.snapshot_slots = a.committed.snapshot_slots.first(5); }},
  };
}

void run(Speculation& spec, Call call, Arguments& a) {
  switch (call) {
    case Call::describe:
      return spec.describe(a.drafts, a.places, a.arrays);
    case Call::accept:
      return spec.accept(a.drafts, a.chosen, a.accepted);
    case Call::accept_sampled:
      return spec.accept(a.drafts, a.probabilities, a.accepted);
    case Call::commit:
      return spec.commit(a.drafts, a.arrays, a.accepted, a.committed);
  }
}

class MisusedDrafts : public ::testing::Test {
 protected:
  KvCacheSpec cache_{.layers = 1, .kv_heads = 1, .head_dim = 8, .head_dim_v = 8, .page_size = 4};
  std::unique_ptr<KvPool> pool_ = make_kv_pool(cache_, 10);
  KvPool* pools_[1] = {pool_.get()};
  ThreadPool threads_{1};
  SpeculationLimits limits_{.max_requests = 2, .width = 3};
};

TEST_F(MisusedDrafts, IsNamed) {
  const auto spec = make_speculation(limits_, pools_, {}, &threads_);
  for (const Call call : {Call::describe, Call::accept, Call::accept_sampled, Call::commit}) {
    Arguments valid;
    EXPECT_NO_THROW(run(*spec, call, valid));
  }
  for (const std::vector<Misuse>& misuses : {misuses_of_describe(), misuses_of_results()}) {
    for (const Misuse& misuse : misuses) {
      SCOPED_TRACE(misuse.message);
      Arguments arguments;
      misuse.spoil(arguments);
      expect_invalid(misuse.message, [&] { run(*spec, misuse.call, arguments); });
    }
  }
}

// Unused nodes and padding may hold any token.
TEST_F(MisusedDrafts, TokensThatNobodyTestsMayBeAnything) {
  const auto spec = make_speculation(limits_, pools_, {}, &threads_);
  Arguments a;
  a.tokens = {-7, 99, 2, -1, -1, -1};
  a.parents[1] = -1;
  a.lens[1] = -1;
  EXPECT_NO_THROW(spec->accept(a.drafts, a.probabilities, a.accepted));
  EXPECT_EQ(a.counts[1], 0);
}

TEST_F(MisusedDrafts, LimitsAndPoolsAreNamed) {
  const auto make = [&](SpeculationLimits limits) {
    make_speculation(limits, pools_, {}, &threads_);
  };
  expect_invalid("max_requests is 0, must be in [1, 65535]", [&] { make({0, 1}); });
  expect_invalid("max_requests is 65536", [&] { make({65536, 1}); });
  expect_invalid("width is 65, must be in [1, 64]", [&] { make({1, 65}); });
  expect_invalid("width is 0", [&] { make({1, 0}); });
  expect_invalid("threads is null", [&] { make_speculation(limits_, pools_, {}, nullptr); });
  KvPool* const none[] = {pool_.get(), nullptr};
  expect_invalid("pools[1] is null", [&] { make_speculation(limits_, none, {}, &threads_); });
  expect_invalid("pools[0] is on cpu, the drafts are on cuda:0", [&] {
    make_speculation(limits_, pools_, {DeviceKind::cuda, 0}, nullptr);
  });
  expect_invalid("device has kind DeviceKind(7)", [&] {
    make_speculation(limits_, pools_, {static_cast<DeviceKind>(7), 0}, nullptr);
  });
}

}  // namespace
}  // namespace fovea
