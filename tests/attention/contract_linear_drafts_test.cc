// SPDX-License-Identifier: Apache-2.0
// Drafts that the slots of a state pool keep, for every built-in backend of linear layers: whatever
// is accepted, rejected or rolled back, tokens have the bits that they have without drafts if the
// spec is batch-invariant, else their values.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "fovea/select_backend.h"
#include "support/cases.h"
#include "support/expect_close.h"
#include "support/expect_error.h"
#include "support/linear_case.h"
#include "support/packed_batch.h"
#include "support/run_linear.h"
#include "support/test_device.h"

namespace fovea {
namespace {

using test::kSnapshots;
using test::LinearCase;
using test::LinearContract;
using test::LinearData;
using test::LinearExtras;
using test::LinearRun;
using test::LinearSequence;
using test::Piece;

constexpr int32_t kMaxDrafts = 5;

// Adds cases with states of 16 bits whose passes are large enough for all kernels of a large GPU.
void add_many_heads(std::vector<LinearCase>& cases) {
  for (const char* name : {"delta_128", "kda_128", "lightning_128", "mamba2_rounded_bf16_states"}) {
    LinearCase test = *std::ranges::find(cases, name, &LinearCase::name);
    test.name += "_many_heads";
    test.spec.linear.key_heads = 2;
    test.spec.linear.value_heads = test.spec.kind == AttentionKind::mamba2 ? 144 : 72;
    test.state_dtype = DType::bf16;
    test.lengths = {9, 6};
    cases.push_back(test);
  }
}

// Batch-invariant cases: the bits of a token do not depend on how passes are divided.
std::vector<LinearCase> cases() {
  std::vector<LinearCase> cases = test::linear_cases();
  if (test::on_gpu()) add_many_heads(cases);
  std::erase_if(cases, [](const LinearCase& test) { return !can_keep_drafts(test.spec.kind); });
  for (LinearCase& test : cases) {
    test.spec.batch_invariant = true;
    for (int32_t& length : test.lengths) length = std::min(length, 40);
  }
  return cases;
}

size_t width_of(const LinearCase& test) {
  return static_cast<size_t>(test.spec.linear.value_heads) *
         static_cast<size_t>(test.spec.linear.value_dim);
}

size_t longest_of(const LinearCase& test) {
  return static_cast<size_t>(std::ranges::max_element(test.lengths) - test.lengths.begin());
}

// Takes all sequences through random passes: prompts, decodes and drafts, of which any number is
// accepted, by a length or by a snapshot.
class RandomPasses {
 public:
  RandomPasses(const LinearContract& contract, const LinearData& data, uint32_t seed)
      : test_(contract.test),
        run_(contract.entry, contract.test, data, 2, kMaxDrafts),
        random_(seed),
        lengths_(test_.lengths.size()),
        outputs_(test_.lengths.size()) {}

  std::vector<std::vector<float>> all() {
    while (std::ranges::any_of(open(), [](bool is_open) { return is_open; })) step();
    EXPECT_TRUE(run_.others_untouched());
    return outputs_;
  }
  int64_t rejected() const { return rejected_; }

 private:
  int32_t pick(int32_t count) {
    return static_cast<int32_t>(random_() % static_cast<uint32_t>(count));
  }

  std::vector<bool> open() const {
    std::vector<bool> open;
    for (size_t i = 0; i < lengths_.size(); ++i) open.push_back(lengths_[i] < test_.lengths[i]);
    return open;
  }

  // A piece of a request, its last tokens drafts.
  Piece piece_of(size_t request, bool one_token, int32_t& drafts) {
    const int32_t left = test_.lengths[request] - lengths_[request];
    const int32_t certain = pick(6) == 0 ? 9 : pick(3);
    drafts = pick(2) == 0 ? 0 : pick(kMaxDrafts + 1);
    if (one_token) drafts = pick(2);
    drafts = std::min(drafts, left);
    int32_t tokens = std::min(left, certain + drafts);
    if (one_token) tokens = std::max(drafts, std::min(tokens, 1));
    return {request, lengths_[request], lengths_[request] + tokens};
  }

  void step() {
    const bool one_token = pick(4) == 0;
    std::vector<Piece> pieces = {{test_.lengths.size(), 0, 1}};  // padding
    LinearExtras extras = {.snapshots = {-1}, .drafts = {0}};
    const size_t saved = static_cast<size_t>(pick(static_cast<int32_t>(lengths_.size())));
    for (size_t i = 0; i < lengths_.size(); ++i) {
      if (!open()[i] || pick(4) == 0) continue;
      int32_t drafts = 0;
      const Piece piece = piece_of(i, one_token, drafts);
      pieces.push_back(piece);
      extras.drafts.push_back(drafts);
      for (int32_t t = 0; t < piece.end - piece.begin; ++t) {
        extras.snapshots.push_back(i == saved && t < kSnapshots ? t : -1);
      }
    }
    if (pick(2) == 0) extras.snapshots.clear();
    const std::vector<float> rows =
        run_.run_with(extras, pieces, one_token ? ForwardMode::decode : ForwardMode::mixed);
    auto from = rows.begin() + static_cast<int64_t>(width_of(test_));
    for (size_t i = 1; i < pieces.size(); ++i) {
      const bool has_snapshots = !extras.snapshots.empty() && pieces[i].request == saved;
      accept(pieces[i], extras.drafts[i], has_snapshots, from);
      from += (pieces[i].end - pieces[i].begin) * static_cast<int64_t>(width_of(test_));
    }
  }

  void accept(const Piece& piece, int32_t drafts, bool has_snapshots,
              std::vector<float>::const_iterator from) {
    const int32_t tokens = piece.end - piece.begin, accepted = pick(drafts + 1);
    const int32_t kept = tokens - drafts + accepted;
    rejected_ += drafts - accepted;
    lengths_[piece.request] += kept;
    auto& outputs = outputs_[piece.request];
    outputs.insert(outputs.end(), from, from + kept * static_cast<int64_t>(width_of(test_)));
    // A snapshot behind the last accepted token serves as well as the slot itself.
    const bool by_snapshot = has_snapshots && kept > 0 && kept <= kSnapshots && pick(2) == 0;
    if (by_snapshot) run_.exchange(piece.request, kept - 1);
  }

  const LinearCase& test_;
  LinearRun run_;
  std::mt19937 random_;
  std::vector<int32_t> lengths_;  // tokens that each sequence has
  std::vector<std::vector<float>> outputs_;
  int64_t rejected_ = 0;
};

class LinearDrafts : public ::testing::TestWithParam<LinearContract> {
 protected:
  const LinearCase& test() const { return GetParam().test; }
  LinearRun run_over(const LinearData& data, int32_t max_drafts) const {
    return LinearRun(GetParam().entry, test(), data, 1, max_drafts);
  }
};

TEST_P(LinearDrafts, TokensHaveTheBitsOfPassesWithoutDrafts) {
  const LinearData data = make_data(test());
  std::vector<std::vector<float>> want;
  LinearRun whole = run_over(data, 0);
  for (size_t i = 0; i < test().lengths.size(); ++i) {
    want.push_back(whole.run({{i, 0, test().lengths[i]}}));
  }
  int64_t rejected = 0;
  for (int64_t seed = 0; seed < 4 * test::test_scale(); ++seed) {
    SCOPED_TRACE(seed);
    RandomPasses passes(GetParam(), data, static_cast<uint32_t>(seed));
    ASSERT_EQ(passes.all(), want);
    rejected += passes.rejected();
  }
  EXPECT_GT(rejected, 0);
}

TEST_P(LinearDrafts, TokensAreCloseWhereBitsMayDependOnPasses) {
  LinearContract contract = GetParam();
  contract.test.spec.batch_invariant = false;
  const LinearData data = make_data(contract.test);
  std::vector<test::OracleResult> want;
  for (size_t i = 0; i < test().lengths.size(); ++i) want.push_back(oracle(test(), data, i));
  for (int64_t seed = 0; seed < 4 * test::test_scale(); ++seed) {
    SCOPED_TRACE(seed);
    const auto outputs = RandomPasses(contract, data, static_cast<uint32_t>(seed)).all();
    for (size_t i = 0; i < outputs.size(); ++i) {
      ASSERT_TRUE(is_close(contract.test.spec, want[i], outputs[i], {})) << "sequence " << i;
    }
  }
}

// A step that is rolled back leaves the state as it was: its drafts may come again, and others.
TEST_P(LinearDrafts, ARollbackIsALength) {
  const LinearData data = make_data(test());
  const size_t longest = longest_of(test());
  LinearRun plain = run_over(data, 0);
  const std::vector<float> want = plain.run({{longest, 0, 9}});
  for (const int32_t prompt : {0, 3}) {
    LinearRun run = run_over(data, kMaxDrafts);
    std::vector<float> out;
    if (prompt > 0) out = run.run({{longest, 0, prompt}});
    for (int32_t drafts = 1; drafts <= kMaxDrafts; ++drafts) {
      (void)run.run_with({.drafts = {drafts}}, {{longest, prompt, prompt + drafts}});
    }
    const std::vector<float> rest = run.run({{longest, prompt, 9}});
    out.insert(out.end(), rest.begin(), rest.end());
    EXPECT_EQ(out, want) << "after " << prompt;
  }
}

// Drafts that are not accepted may be anything: neither the tokens before them nor later passes see
// them.
TEST_P(LinearDrafts, RejectedDraftsLeaveNothing) {
  const size_t longest = longest_of(test());
  for (const bool invariant : {true, false}) {
    LinearContract contract = GetParam();
    contract.test.spec.batch_invariant = invariant;
    const LinearData data = make_data(contract.test);
    LinearData passes = data;
    LinearSequence& sequence = passes.sequences[longest];
    LinearRun clean(contract.entry, contract.test, data, 1, kMaxDrafts);
    LinearRun run(contract.entry, contract.test, passes, 1, kMaxDrafts);
    const auto tokens = static_cast<size_t>(contract.test.lengths[longest]);
    for (LinearRun* each : {&clean, &run}) (void)each->run({{longest, 0, 2}});
    for (auto* values : {&sequence.mixed, &sequence.log_decay, &sequence.beta}) {
      const size_t width = values->size() / tokens;
      std::fill(values->begin() + static_cast<int64_t>(4 * width), values->end(), INFINITY);
    }
    const LinearExtras drafts = {.drafts = {2}};  // the last one is not accepted
    std::vector<float> out = run.run_with(drafts, {{longest, 2, 5}});
    std::vector<float> want = clean.run_with(drafts, {{longest, 2, 5}});
    out.resize(2 * width_of(test()));
    want.resize(2 * width_of(test()));
    EXPECT_EQ(out, want);
    sequence = data.sequences[longest];
    EXPECT_EQ(run.run({{longest, 4, 5}}), clean.run({{longest, 4, 5}}));
  }
}

// A request whose first pass has drafts alone finds an earlier request's state in its slot.
TEST_P(LinearDrafts, ANewStateBeforeDraftsIsZero) {
  const LinearData data = make_data(test());
  const size_t longest = longest_of(test());
  LinearRun run = run_over(data, kMaxDrafts);
  const std::vector<float> want = run.run({{longest, 0, 9}});
  std::vector<float> out = run.run_with({.drafts = {4}}, {{longest, 0, 4}});
  out.resize(2 * width_of(test()));
  const std::vector<float> rest = run.run({{longest, 2, 9}});
  out.insert(out.end(), rest.begin(), rest.end());
  EXPECT_EQ(out, want);
}

// Drafts count on the device alone: one captured pass serves any number of them, and any number of
// accepted ones.
TEST_P(LinearDrafts, GraphReplayEqualsEager) {
  if (!test::on_gpu()) GTEST_SKIP() << "a CPU has no graphs";
  const LinearData data = make_data(test());
  const size_t longest = longest_of(test()), other = longest == 0 ? 1 : 0;
  const size_t padding = test().lengths.size();
  const std::vector<std::vector<Piece>> batches = {{{longest, 0, 5}, {other, 0, 1}},
                                                   {{longest, 3, 7}, {padding, 0, 1}},
                                                   {{longest, 3, 8}, {padding, 0, 0}},
                                                   {{longest, 8, 9}, {padding, 0, 1}}};
  const std::vector<std::vector<int32_t>> drafts = {{4, 1}, {4, 1}, {5, 0}, {0, 0}};
  LinearRun eager = run_over(data, kMaxDrafts), replayed = run_over(data, kMaxDrafts);
  const auto outputs = replayed.replay(batches, ForwardMode::mixed, drafts);
  for (size_t i = 0; i < batches.size(); ++i) {
    EXPECT_EQ(outputs[i], eager.run_with({.drafts = drafts[i]}, batches[i])) << "batch " << i;
  }
}

TEST_P(LinearDrafts, RefusesWhatASlotDoesNotHold) {
  const LinearData data = make_data(test());
  const size_t longest = longest_of(test());
  LinearRun without = run_over(data, 0), run = run_over(data, kMaxDrafts);
  test::expect_invalid("linear.draft_counts is given, the state pool keeps no drafts", [&] {
    (void)without.run_with({.drafts = {1}}, {{longest, 0, 2}});
  });
  if (test::on_gpu()) return;
  test::expect_invalid("linear.draft_counts[0] is 3, must be in [0, 2]", [&] {
    (void)run.run_with({.drafts = {3}}, {{longest, 0, 2}});
  });
  test::expect_invalid("linear.draft_counts[0] is 6, must be in [0, 5]", [&] {
    (void)run.run_with({.drafts = {6}}, {{longest, 0, 7}});
  });
  test::expect_invalid("linear.draft_counts[0] is -1, must be in [0, 2]", [&] {
    (void)run.run_with({.drafts = {-1}}, {{longest, 0, 2}});
  });
  (void)run.run_with({.drafts = {2}}, {{longest, 0, 5}});
  test::expect_invalid("request 0: it continues from 2 tokens, linear.state_slots[0] =", [&] {
    (void)run.run({{longest, 2, 4}});
  });
  test::expect_invalid("holds 3 and 2 drafts", [&] { (void)run.run({{longest, 6, 7}}); });
}

// On a GPU the host sees no lengths: such a request counts as one without a slot.
TEST_P(LinearDrafts, WrongLengthsHarmNobody) {
  if (!test::on_gpu()) GTEST_SKIP() << "a CPU refuses them by name";
  const LinearData data = make_data(test());
  const size_t longest = longest_of(test()), other = longest == 0 ? 1 : 0;
  LinearRun run = run_over(data, kMaxDrafts), clean = run_over(data, 0);
  const std::vector<float> want = clean.run({{longest, 0, 9}});
  const std::vector<float> one = clean.run({{other, 0, 1}});
  const size_t width = width_of(test());
  std::vector<float> out = run.run_with({.drafts = {2}}, {{longest, 0, 5}});
  out.resize(3 * width);
  const std::vector<std::pair<Piece, int32_t>> wrong = {
      {{longest, 2, 4}, 0}, {{longest, 6, 7}, 0}, {{longest, 3, 5}, 3}, {{longest, 3, 5}, -1}};
  for (const auto& [piece, drafts] : wrong) {
    const std::vector<float> rows = run.run_with({.drafts = {drafts, 0}}, {piece, {other, 0, 1}});
    const auto live = rows.end() - static_cast<int64_t>(width);
    EXPECT_TRUE(std::all_of(rows.begin(), live, [](float x) { return x == 0; }));
    EXPECT_TRUE(std::equal(one.begin(), one.end(), live));
  }
  const std::vector<float> rest = run.run({{longest, 3, 9}});
  out.insert(out.end(), rest.begin(), rest.end());
  EXPECT_EQ(out, want);
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LinearDrafts);
INSTANTIATE_TEST_SUITE_P(Builtin, LinearDrafts,
                         ::testing::ValuesIn(test::linear_contracts(cases())), test::name_of);

}  // namespace
}  // namespace fovea
