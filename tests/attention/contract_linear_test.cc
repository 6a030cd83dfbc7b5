// SPDX-License-Identifier: Apache-2.0
// The promises of AttentionBackend for linear layers, for every built-in backend.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "fovea/select_backend.h"
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
using test::LinearRun;
using test::Piece;

// Runs every sequence in pieces of `size` tokens: one batch per round with all unfinished
// sequences.
std::vector<std::vector<float>> in_pieces(LinearRun& run, const LinearCase& test, int32_t size) {
  const size_t width =
      test.spec.linear.value_heads * static_cast<size_t>(test.spec.linear.value_dim);
  std::vector<std::vector<float>> outputs(test.lengths.size());
  const int32_t longest = *std::max_element(test.lengths.begin(), test.lengths.end());
  for (int32_t begin = 0; begin < longest; begin += size) {
    std::vector<Piece> pieces;
    for (size_t request = 0; request < test.lengths.size(); ++request) {
      const int32_t end = std::min(begin + size, test.lengths[request]);
      if (begin < end) pieces.push_back({request, begin, end});
    }
    const std::vector<float> rows = run.run(pieces);
    auto from = rows.begin();
    for (const Piece& piece : pieces) {
      const auto to = from + static_cast<int64_t>((piece.end - piece.begin) * width);
      outputs[piece.request].insert(outputs[piece.request].end(), from, to);
      from = to;
    }
  }
  return outputs;
}

class Linear : public ::testing::TestWithParam<LinearContract> {
 protected:
  const LinearCase& test() const { return GetParam().test; }

  // Returns the tokens of a prompt from which on it is computed in chunks if the spec is not
  // batch-invariant; 0: never.
  int32_t chunked_from() const {
    if (convolves_alone(test().spec.kind)) return 0;
    if (GetParam().entry.name == "linear") return test().spec.kind == AttentionKind::kda ? 0 : 64;
    return test::test_device().sm == 90 && test().spec.q_dtype != DType::f32 ? 64 : 0;
  }

  void expect_oracle(const LinearData& data, const std::vector<std::vector<float>>& outputs) {
    for (size_t i = 0; i < outputs.size(); ++i) {
      EXPECT_TRUE(is_close(test().spec, oracle(test(), data, i), outputs[i], {}))
          << "sequence " << i;
    }
  }
};

TEST_P(Linear, MatchesTheOracleInPiecesOfAnySize) {
  const LinearData data = make_data(test());
  for (int32_t size : {1000, 64, 3, 1}) {
    SCOPED_TRACE(size);
    LinearRun run(GetParam().entry, test(), data, 2);
    expect_oracle(data, in_pieces(run, test(), size));
    EXPECT_TRUE(run.others_untouched());
  }
}

TEST_P(Linear, ThreadCountsChangeNoBit) {
  const LinearData data = make_data(test());
  LinearRun one(GetParam().entry, test(), data, 1);
  const auto want = in_pieces(one, test(), 50);
  for (int threads : {2, 3}) {
    LinearRun several(GetParam().entry, test(), data, threads);
    EXPECT_EQ(in_pieces(several, test(), 50), want) << threads << " threads";
  }
}

TEST_P(Linear, BatchInvariantRowsDependOnTheirTokensOnly) {
  LinearContract contract = GetParam();
  contract.test.spec.batch_invariant = true;
  if (!contract.entry.reject(request_of(contract.test, 1)).empty()) {
    GTEST_SKIP() << "rejects batch_invariant";
  }
  const LinearData data = make_data(contract.test);
  LinearRun whole(contract.entry, contract.test, data, 1);
  const auto want = in_pieces(whole, contract.test, 1000);
  for (int32_t size : {64, 7, 1}) {
    LinearRun run(contract.entry, contract.test, data, 2);
    EXPECT_EQ(in_pieces(run, contract.test, size), want) << "pieces of " << size;
  }
  LinearRun alone(contract.entry, contract.test, data, 1);
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_EQ(alone.run({{i, 0, contract.test.lengths[i]}}), want[i]) << "sequence " << i;
  }
}

TEST_P(Linear, APlanThatFailsLeavesNone) {
  const LinearData data = make_data(test());
  LinearRun run(GetParam().entry, test(), data, 1);
  (void)run.run({{0, 0, 1}});
  EXPECT_EQ(run.error_behind_a_refused_plan(), "forward() without a plan");
}

// Padding gives zeros and touches no state; requests without tokens touch nothing either.
TEST_P(Linear, PaddingIsZeroAndWritesNothing) {
  const LinearData data = make_data(test());
  LinearRun run(GetParam().entry, test(), data, 2);
  const size_t padding = test().lengths.size();
  const size_t width =
      test().spec.linear.value_heads * static_cast<size_t>(test().spec.linear.value_dim);
  const auto last = static_cast<size_t>(test().lengths.size()) - 1;
  const int32_t length = test().lengths[last];
  const std::vector<float> first = run.run({{last, 0, length / 2}});
  const std::vector<float> out =
      run.run({{padding, 0, 1}, {last, length / 2, length}, {last - 1, 0, 0}, {padding, 0, 1}});
  EXPECT_TRUE(run.others_untouched());
  ASSERT_EQ(out.size(), (2 + static_cast<size_t>(length - length / 2)) * width);
  for (size_t i = 0; i < width; ++i) {
    EXPECT_EQ(out[i], 0);
    EXPECT_EQ(out[out.size() - width + i], 0);
  }
  std::vector<float> whole = first;
  whole.insert(whole.end(), out.begin() + static_cast<int64_t>(width),
               out.end() - static_cast<int64_t>(width));
  EXPECT_TRUE(is_close(test().spec, oracle(test(), data, last), whole, {}));
}

// Verifies a draft of `drafted` tokens with a snapshot after each. For any number of accepted
// tokens the sequence continues as if the others had never been there.
TEST_P(Linear, SnapshotsUndoRejectedDrafts) {
  const LinearData data = make_data(test());
  const auto longest = static_cast<size_t>(
      std::max_element(test().lengths.begin(), test().lengths.end()) - test().lengths.begin());
  const size_t other = longest == 0 ? 1 : 0;
  const int32_t length = test().lengths[longest];
  const int32_t drafted = std::min(kSnapshots, length - 2);
  LinearRun whole(GetParam().entry, test(), data, 1);
  const std::vector<float> want = whole.run({{longest, 0, length}});
  const size_t width =
      test().spec.linear.value_heads * static_cast<size_t>(test().spec.linear.value_dim);
  for (int32_t prompt : {0, 1}) {  // the first draft starts from nothing, or from a state
    for (int32_t accepted = 1; accepted <= drafted; ++accepted) {
      SCOPED_TRACE(fmt::format("{} of {} tokens accepted after {}", accepted, drafted, prompt));
      LinearRun run(GetParam().entry, test(), data, 2);
      std::vector<float> out;
      if (prompt > 0) out = run.run({{longest, 0, prompt}});
      // With other requests, and after a token without a snapshot.
      std::vector<int32_t> snapshots = {-1};
      for (int32_t i = 0; i < drafted; ++i) snapshots.push_back(drafted - 1 - i);
      const std::vector<float> verified =
          run.run({{other, 0, 1}, {longest, prompt, prompt + drafted}}, snapshots);
      const auto first = verified.begin() + static_cast<int64_t>(width);
      out.insert(out.end(), first, first + static_cast<int64_t>(accepted * width));
      run.restore(longest, drafted - accepted);
      const std::vector<float> rest = run.run({{longest, prompt + accepted, length}});
      out.insert(out.end(), rest.begin(), rest.end());
      if (chunked_from() == 0) {
        EXPECT_EQ(out, want);
      } else {  // verified tokens and prompts may be rounded differently
        EXPECT_TRUE(is_close(test().spec, oracle(test(), data, longest), out, {}));
      }
    }
  }
}

// A prompt leaves snapshots: inside, where they end chunks, and before its last token. A request
// that continues from one gives what the prompt gave, to the bit if the spec is batch-invariant.
TEST_P(Linear, SnapshotsInsidePrompts) {
  const LinearData data = make_data(test());
  const auto longest = static_cast<size_t>(
      std::max_element(test().lengths.begin(), test().lengths.end()) - test().lengths.begin());
  const int32_t length = test().lengths[longest];
  for (const bool invariant : {false, true}) {
    LinearContract contract = GetParam();
    contract.test.spec.batch_invariant = invariant;
    if (!contract.entry.reject(request_of(contract.test, 1)).empty()) continue;
    LinearRun run(contract.entry, contract.test, data, 2);
    std::vector<int32_t> snapshots(static_cast<size_t>(length), -1);
    const int32_t kept[] = {length / 2, length - 1};  // tokens that a snapshot has seen
    for (int32_t i = 0; i < 2; ++i) snapshots[static_cast<size_t>(kept[i]) - 1] = i;
    if (kept[0] == kept[1]) continue;
    const std::vector<float> all = run.run({{longest, 0, length}}, snapshots);
    EXPECT_TRUE(is_close(test().spec, oracle(test(), data, longest), all, {}));
    for (int32_t i = 0; i < 2; ++i) {
      SCOPED_TRACE(fmt::format("after {} of {} tokens, invariant {}", kept[i], length, invariant));
      run.restore(longest, i);
      const std::vector<float> last = run.run({{longest, kept[i], length}});
      std::vector<float> joined(all.begin(), all.end() - static_cast<int64_t>(last.size()));
      joined.insert(joined.end(), last.begin(), last.end());
      if (invariant || chunked_from() == 0) {
        EXPECT_EQ(joined, all);
      } else {
        EXPECT_TRUE(is_close(test().spec, oracle(test(), data, longest), joined, {}));
      }
    }
    EXPECT_TRUE(run.others_untouched());
  }
}

std::string error_of_snapshots(LinearRun& run, const std::vector<int32_t>& snapshots) {
  return test::error_of([&] { run.run({{1, 0, 2}}, snapshots); });
}

TEST_P(Linear, SnapshotsGoToSlotsOfTheirOwn) {
  if (test::on_gpu()) GTEST_SKIP() << "the host does not see slots of a GPU";
  const LinearData data = make_data(test());
  LinearRun run(GetParam().entry, test(), data, 1);
  const auto requests = static_cast<int32_t>(test().lengths.size());
  const std::string beyond = error_of_snapshots(run, {-1, kSnapshots + 1});
  EXPECT_EQ(beyond, fmt::format("linear.snapshot_slots[1] is {0}, must be in [-1, {0})",
                                requests + 2 + kSnapshots));
  EXPECT_EQ(error_of_snapshots(run, {3, 3}),
            fmt::format("linear.snapshot_slots[1] is {}, which is linear.snapshot_slots[0]",
                        requests + 4));
  EXPECT_EQ(
      error_of_snapshots(run, {-2, -1}),  // the slot of request 1
      fmt::format("linear.snapshot_slots[0] is {}, which is linear.state_slots[0]", requests - 1));
}

TEST_P(Linear, RequestsHaveStatesOfTheirOwn) {
  if (test::on_gpu()) GTEST_SKIP() << "the host does not see slots of a GPU";
  const LinearData data = make_data(test());
  LinearRun run(GetParam().entry, test(), data, 1);
  test::expect_invalid(", which is linear.state_slots[0]", [&] {
    run.run({{1, 0, 2}, {1, 0, 2}});
  });
}

// A captured pass serves any lengths and slots: prompts, single tokens, padding and nothing at all.
TEST_P(Linear, GraphReplayEqualsEager) {
  if (!test::on_gpu()) GTEST_SKIP() << "a CPU has no graphs";
  const LinearData data = make_data(test());
  const size_t padding = test().lengths.size();
  const auto longest = static_cast<size_t>(
      std::max_element(test().lengths.begin(), test().lengths.end()) - test().lengths.begin());
  const size_t other = longest == 0 ? 1 : 0;
  const int32_t length = test().lengths[longest];
  const std::vector<std::vector<Piece>> batches = {
      {{longest, 0, length - 3}, {other, 0, 1}, {padding, 0, 1}},
      {{longest, length - 3, length - 2}, {padding, 0, 0}, {padding, 0, 0}},
      {{padding, 0, 1}, {longest, length - 2, length}, {other, 0, 0}},
  };
  LinearRun eager(GetParam().entry, test(), data, 1), replayed(GetParam().entry, test(), data, 1);
  const auto outputs = replayed.replay(batches, ForwardMode::mixed);
  for (size_t i = 0; i < batches.size(); ++i) {
    EXPECT_EQ(outputs[i], eager.run(batches[i])) << "batch " << i;
  }
  EXPECT_TRUE(replayed.others_untouched());
}

// Passes with one token a request give the bits of those with any number.
TEST_P(Linear, DecodeEqualsMixed) {
  const LinearData data = make_data(test());
  LinearRun mixed(GetParam().entry, test(), data, 1), decode(GetParam().entry, test(), data, 1);
  const std::vector<int32_t>& lengths = test().lengths;
  const auto longest = static_cast<size_t>(std::ranges::max_element(lengths) - lengths.begin());
  for (int32_t t = 0; t < 3; ++t) {
    std::vector<Piece> pieces = {{lengths.size(), 0, 1}};  // padding
    std::vector<int32_t> snapshots = {-1};
    for (size_t i = 0; i < lengths.size(); ++i) {
      const bool runs = t < lengths[i];
      pieces.push_back({i, runs ? t : 0, runs ? t + 1 : 0});
      if (runs) snapshots.push_back(i == longest ? t : -1);
    }
    EXPECT_EQ(decode.run(pieces, snapshots, ForwardMode::decode), mixed.run(pieces, snapshots))
        << "token " << t;
  }
  for (LinearRun* run : {&mixed, &decode}) run->restore(longest, 1);
  const std::vector<Piece> next = {{longest, 2, 3}};
  EXPECT_EQ(decode.run(next, {}, ForwardMode::decode), mixed.run(next));
  EXPECT_TRUE(decode.others_untouched());
}

// Slots that the pool does not have count as padding.
TEST_P(Linear, WildSlotsHarmNobody) {
  if (!test::on_gpu()) GTEST_SKIP() << "a CPU refuses them by name";
  const LinearData data = make_data(test());
  LinearRun run(GetParam().entry, test(), data, 1), clean(GetParam().entry, test(), data, 1);
  const std::vector<float> want = clean.run({{0, 0, 1}});
  for (const int32_t wild : {kSnapshots + 1, -100, INT32_MIN, 1 << 30}) {
    run.restore(1, wild);
    const std::vector<float> out = run.run({{1, 0, 2}, {0, 0, 1}}, {wild, wild, wild});
    ASSERT_EQ(out.size(), 3 * want.size());
    const auto live = out.end() - static_cast<int64_t>(want.size());
    EXPECT_TRUE(std::all_of(out.begin(), live, [](float x) { return x == 0; }));
    EXPECT_TRUE(std::equal(want.begin(), want.end(), live));
  }
  EXPECT_TRUE(run.others_untouched());
}

// Prompts that are computed in chunks have other bits than token by token.
TEST_P(Linear, PromptsAreComputedInChunksWhereTheSpecAllowsIt) {
  if (chunked_from() == 0) GTEST_SKIP() << "computes token by token";
  LinearContract exact = GetParam();
  exact.test.spec.batch_invariant = true;
  const LinearData data = make_data(test());
  LinearRun one_by_one(exact.entry, exact.test, data, 1), chunked(exact.entry, test(), data, 1);
  for (size_t i = 0; i < test().lengths.size(); ++i) {
    const std::vector<Piece> pieces = {{i, 0, test().lengths[i]}};
    EXPECT_EQ(chunked.run(pieces) == one_by_one.run(pieces), test().lengths[i] < chunked_from())
        << i;
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Linear);
INSTANTIATE_TEST_SUITE_P(Builtin, Linear,
                         ::testing::ValuesIn(test::linear_contracts(test::linear_cases())),
                         test::name_of);

TEST(LinearContracts, EveryCaseIsServed) {
  if (!test::why_no_test_device().empty()) GTEST_SKIP() << test::why_no_test_device();
  const BackendRegistry registry = BackendRegistry::builtin();
  for (const LinearCase& test : test::linear_cases()) {
    EXPECT_NO_THROW(select_backend(registry, request_of(test, 1))) << test.name;
  }
}

}  // namespace
}  // namespace fovea
