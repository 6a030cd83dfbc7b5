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
#include "support/poison.h"

namespace fovea {
namespace {

using test::Fill;
using test::LinearCase;
using test::LinearData;
using test::Piece;

struct Contract {
  BackendEntry entry;
  LinearCase test;
};

void PrintTo(const Contract& contract, std::ostream* to) {
  *to << contract.entry.name << " on " << contract.test.name;
}

BackendRequest request_of(const LinearCase& test, int threads) {
  BackendRequest request;
  request.spec = test.spec;
  request.device = cpu_device();
  request.device.cores = threads;
  request.limits.max_requests = static_cast<int32_t>(test.lengths.size()) + 1;
  request.limits.max_q_len = *std::max_element(test.lengths.begin(), test.lengths.end());
  request.limits.max_kv_len = request.limits.max_q_len;
  request.limits.max_tokens = 0;
  for (int32_t length : test.lengths) request.limits.max_tokens += length + 1;
  return request;
}

std::vector<Contract> contracts() {
  std::vector<Contract> contracts;
  const BackendRegistry registry = BackendRegistry::builtin();
  for (const BackendEntry& entry : registry.entries()) {
    for (const LinearCase& test : test::linear_cases()) {
      if (entry.reject(request_of(test, 1)).empty()) contracts.push_back({entry, test});
    }
  }
  return contracts;
}

constexpr int32_t kSnapshots = 6;

// One backend over one state pool whose slots hold NaN until a request starts in them.
class LinearRun {
 public:
  LinearRun(const Contract& contract, const LinearData& data, int threads)
      : test_(contract.test),
        data_(data),
        threads_(threads),
        pool_(make_state_pool(test::state_spec(test_),
                              static_cast<int32_t>(test_.lengths.size()) + 2 + kSnapshots)),
        workspace_(contract.entry.workspace_bytes(request_of(test_, threads)), Fill::poison) {
    // In reverse, so that slot and request numbers differ; slot 0 and the last stay free.
    for (size_t i = test_.lengths.size(); i > 0; --i) slots_.push_back(static_cast<int32_t>(i));
    poison_states();
    BackendContext context;
    context.spec = test_.spec;
    context.state = pool_.get();
    context.threads = &threads_;
    backend_ = contract.entry.create(context);
    backend_->reserve(request_of(test_, threads).limits, workspace_.bytes());
  }

  // Returns the outputs of the batch's rows. A piece of request -1 is padding with state slot -1.
  // snapshots[t]: the snapshot that the state after token t becomes, -1: none.
  std::vector<float> run(const std::vector<Piece>& pieces,
                         const std::vector<int32_t>& snapshots = {}) {
    Arrays arrays;
    for (const Piece& piece : pieces) append(piece, arrays);
    for (int32_t snapshot : snapshots) {
      arrays.snapshot_slots.push_back(snapshot == -1 ? -1 : snapshot_slot(snapshot));
    }
    const auto tokens = static_cast<int32_t>(arrays.q_indptr.back());
    const int64_t width = int64_t{test_.spec.linear.value_heads} * test_.spec.linear.value_dim;
    std::vector<float> out(static_cast<size_t>((tokens + 2) * width), NAN);
    BatchView batch;
    batch.mode = ForwardMode::mixed;
    batch.requests = static_cast<int32_t>(pieces.size());
    batch.tokens = tokens;
    batch.q_indptr = arrays.q_indptr;
    batch.kv_lens = arrays.kv_lens;
    batch.linear.state_slots = arrays.state_slots;
    if (!snapshots.empty()) batch.linear.snapshot_slots = arrays.snapshot_slots;
    for (const Piece& piece : pieces) {
      batch.hints.max_q_len = std::max(batch.hints.max_q_len, piece.end - piece.begin);
      batch.hints.max_kv_len = std::max(batch.hints.max_kv_len, piece.end);
    }
    LayerTensors layer;
    layer.layer = 1;
    layer.out = dense_rows(out.data(), DType::f32, test_.spec.linear.value_heads,
                           test_.spec.linear.value_dim);
    layer.linear.mixed = arrays.mixed.data();
    layer.linear.log_decay = arrays.log_decay.data();
    layer.linear.beta = arrays.beta.data();
    if (test_.spec.linear.conv_width > 0) layer.linear.conv_weight = data_.conv_weight.data();
    if (test_.spec.linear.conv_width > 0 && test_.conv_bias) {
      layer.linear.conv_bias = data_.conv_bias.data();
    }
    const bool mamba2 = test_.spec.kind == AttentionKind::mamba2;
    if (mamba2 && test_.skip) layer.linear.skip = data_.skip.data();
    layer.linear.l2_normalise_qk = !mamba2 && test_.l2_normalise;
    backend_->plan(batch);
    backend_->forward(layer);
    EXPECT_TRUE(workspace_.guards_intact());
    const auto live = out.begin() + tokens * width;
    EXPECT_TRUE(std::all_of(live, out.end(), [](float x) { return std::isnan(x); }));
    out.erase(live, out.end());
    return out;
  }

  // Returns the error of a forward() after a plan() that was refused.
  std::string error_behind_a_refused_plan() {
    BatchView wrong;
    wrong.mode = ForwardMode::mixed;
    wrong.requests = static_cast<int32_t>(test_.lengths.size()) + 2;
    test::expect_invalid("requests is", [&] { backend_->plan(wrong); });
    return test::error_of([&] { backend_->forward({}); });
  }

  // Lets the request continue from a snapshot.
  void restore(size_t request, int32_t snapshot) { slots_[request] = snapshot_slot(snapshot); }

  // Checks that the other layer and unused slots have not changed.
  bool others_untouched() const {
    const auto all_nan = [](const float* from, int64_t count) {
      return std::all_of(from, from + count, [](float x) { return std::isnan(x); });
    };
    const StateLayerView other = pool_->layer(0), own = pool_->layer(1);
    return all_nan(other.state, other.state_slot_stride * other.slots) &&
           all_nan(own.state, own.state_slot_stride) &&
           all_nan(own.state + (own.slots - 1) * own.state_slot_stride, own.state_slot_stride);
  }

 private:
  struct Arrays {
    std::vector<int32_t> q_indptr = {0}, kv_lens, state_slots, snapshot_slots;
    std::vector<float> mixed, log_decay, beta;
  };

  void poison_states() {
    for (int32_t index = 0; index < 2; ++index) {
      const StateLayerView layer = pool_->layer(index);
      std::fill_n(layer.state, layer.state_slot_stride * layer.slots, NAN);
      std::fill_n(layer.conv, layer.conv_slot_stride * layer.slots, NAN);
    }
  }

  void append(const Piece& piece, Arrays& to) const {
    const bool padding = piece.request >= data_.sequences.size();
    const LinearSequence& sequence = data_.sequences[padding ? 0 : piece.request];
    const auto add = [&](const std::vector<float>& from, int64_t width, std::vector<float>& rows) {
      rows.insert(rows.end(), from.begin() + piece.begin * width, from.begin() + piece.end * width);
    };
    add(sequence.mixed, test_.spec.linear.conv_dim(), to.mixed);
    add(sequence.log_decay, test_.spec.linear.value_heads, to.log_decay);
    add(sequence.beta, test_.spec.linear.value_heads, to.beta);
    to.q_indptr.push_back(to.q_indptr.back() + piece.end - piece.begin);
    to.kv_lens.push_back(piece.end);
    to.state_slots.push_back(padding ? -1 : slots_[piece.request]);
  }

  int32_t snapshot_slot(int32_t snapshot) const {
    return static_cast<int32_t>(data_.sequences.size()) + 1 + snapshot;
  }

  using LinearSequence = test::LinearSequence;
  const LinearCase& test_;
  const LinearData& data_;
  ThreadPool threads_;
  std::vector<int32_t> slots_;  // state slot of each sequence
  std::unique_ptr<StatePool> pool_;
  test::GuardedBuffer workspace_;
  std::unique_ptr<AttentionBackend> backend_;
};

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

class Linear : public ::testing::TestWithParam<Contract> {
 protected:
  const LinearCase& test() const { return GetParam().test; }

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
    LinearRun run(GetParam(), data, 2);
    expect_oracle(data, in_pieces(run, test(), size));
    EXPECT_TRUE(run.others_untouched());
  }
}

TEST_P(Linear, ThreadCountsChangeNoBit) {
  const LinearData data = make_data(test());
  LinearRun one(GetParam(), data, 1);
  const auto want = in_pieces(one, test(), 50);
  for (int threads : {2, 3}) {
    LinearRun several(GetParam(), data, threads);
    EXPECT_EQ(in_pieces(several, test(), 50), want) << threads << " threads";
  }
}

TEST_P(Linear, BatchInvariantRowsDependOnTheirTokensOnly) {
  Contract contract = GetParam();
  contract.test.spec.batch_invariant = true;
  if (!contract.entry.reject(request_of(contract.test, 1)).empty()) {
    GTEST_SKIP() << "rejects batch_invariant";
  }
  const LinearData data = make_data(contract.test);
  LinearRun whole(contract, data, 1);
  const auto want = in_pieces(whole, contract.test, 1000);
  for (int32_t size : {64, 7, 1}) {
    LinearRun run(contract, data, 2);
    EXPECT_EQ(in_pieces(run, contract.test, size), want) << "pieces of " << size;
  }
  LinearRun alone(contract, data, 1);
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_EQ(alone.run({{i, 0, contract.test.lengths[i]}}), want[i]) << "sequence " << i;
  }
}

TEST_P(Linear, APlanThatFailsLeavesNone) {
  const LinearData data = make_data(test());
  LinearRun run(GetParam(), data, 1);
  (void)run.run({{0, 0, 1}});
  EXPECT_EQ(run.error_behind_a_refused_plan(), "forward() without a plan");
}

// Padding gives zeros and touches no state; requests without tokens touch nothing either.
TEST_P(Linear, PaddingIsZeroAndWritesNothing) {
  const LinearData data = make_data(test());
  LinearRun run(GetParam(), data, 2);
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
  LinearRun whole(GetParam(), data, 1);
  const std::vector<float> want = whole.run({{longest, 0, length}});
  const size_t width =
      test().spec.linear.value_heads * static_cast<size_t>(test().spec.linear.value_dim);
  for (int32_t prompt : {0, 1}) {  // the first draft starts from nothing, or from a state
    for (int32_t accepted = 1; accepted <= drafted; ++accepted) {
      SCOPED_TRACE(fmt::format("{} of {} tokens accepted after {}", accepted, drafted, prompt));
      LinearRun run(GetParam(), data, 2);
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
      EXPECT_EQ(out, want);
    }
  }
}

std::string error_of_snapshots(LinearRun& run, const std::vector<int32_t>& snapshots) {
  return test::error_of([&] { run.run({{1, 0, 2}}, snapshots); });
}

TEST_P(Linear, SnapshotsGoToSlotsOfTheirOwn) {
  const LinearData data = make_data(test());
  LinearRun run(GetParam(), data, 1);
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
  const LinearData data = make_data(test());
  LinearRun run(GetParam(), data, 1);
  test::expect_invalid(", which is linear.state_slots[0]", [&] {
    run.run({{1, 0, 2}, {1, 0, 2}});
  });
}

INSTANTIATE_TEST_SUITE_P(Builtin, Linear, ::testing::ValuesIn(contracts()), [](const auto& param) {
  return param.param.entry.name + "_" + param.param.test.name;
});

TEST(LinearContract, EveryCaseIsServed) {
  const BackendRegistry registry = BackendRegistry::builtin();
  for (const LinearCase& test : test::linear_cases()) {
    EXPECT_NO_THROW(select_backend(registry, request_of(test, 1))) << test.name;
  }
}

}  // namespace
}  // namespace fovea
