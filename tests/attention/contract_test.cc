// SPDX-License-Identifier: Apache-2.0
// The promises of AttentionBackend, for every built-in backend and every case of the shared list:
// a backend gives a reason why it does not serve a case, or its result is right.
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/error.h"
#include "support/cases.h"
#include "support/expect_close.h"
#include "support/expect_error.h"
#include "support/run_backend.h"
#include "support/served_case.h"
#include "support/test_device.h"

namespace fovea {
namespace {

using test::AttentionCase;
using test::CaseData;
using test::Fill;
using test::Output;
using test::ServedCase;

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

std::vector<ServedCase> contracts() { return test::served_cases(test::attention_cases()); }

// Calls check(request, out, lse) with the rows of each request of the whole case.
template <typename Check>
void for_each_request(const AttentionCase& test, const Output& output, Check&& check) {
  size_t row = 0;
  const auto heads = static_cast<size_t>(test.spec.q_heads);
  const auto width = static_cast<size_t>(test::out_width(test.spec));
  for (size_t request = 0; request < test.requests.size(); ++request) {
    const size_t rows = test.requests[request].q_len * heads;
    const std::span<const float> out(output.out.data() + row * width, rows * width);
    std::span<const float> lse;
    if (!output.lse.empty()) lse = {output.lse.data() + row, rows};
    check(request, out, lse);
    row += rows;
  }
}

class Served : public ::testing::TestWithParam<ServedCase> {
 protected:
  const BackendEntry& entry() const { return GetParam().entry; }
  const AttentionCase& test() const { return GetParam().test; }
};

TEST_P(Served, MatchesTheOracle) {
  const CaseData data = make_data(test());
  const Output got = run_case(entry(), test(), data, {.fill = Fill::poison});
  for_each_request(test(), got, [&](size_t request, auto out, auto lse) {
    EXPECT_TRUE(is_close(test().spec, oracle(test(), data, request), out, lse))
        << "request " << request;
  });
}

TEST_P(Served, UnownedBytesAndThreadCountsChangeNoBit) {
  const CaseData data = make_data(test());
  const Output clean = run_case(entry(), test(), data, {.fill = Fill::zero, .threads = 1});
  for (int threads : {2, 3}) {
    const Output poisoned =
        run_case(entry(), test(), data, {.fill = Fill::poison, .threads = threads});
    EXPECT_TRUE(same_bits(clean, poisoned)) << threads << " threads";
  }
}

TEST_P(Served, PageTablesGiveTheBitsOfSlots) {
  if (!test::is_cached(test().spec)) GTEST_SKIP() << "keys are packed";
  const CaseData data = make_data(test());
  const Output slots = run_case(entry(), test(), data, {.fill = Fill::zero});
  const Output pages =
      run_case(entry(), test(), data, {.fill = Fill::poison, .tables = test::Tables::pages});
  EXPECT_TRUE(same_bits(slots, pages));
}

TEST_P(Served, OneByteLessOfWorkspaceIsRefusedByName) {
  const BackendRequest request = test::request_of(test());
  const size_t bytes = entry().workspace_bytes(request);
  if (bytes == 0) GTEST_SKIP() << "needs no workspace";
  ThreadPool threads(1);
  const CaseData data = make_data(test());
  std::optional<test::PagedStore> store;
  if (test::is_cached(test().spec)) store.emplace(test(), data, Fill::zero);
  test::BackendUnderTest under_test(entry(), test(), store ? &*store : nullptr, threads);
  AttentionBackend& backend = under_test.backend();
  EXPECT_EQ(backend.workspace_bytes(request.limits), bytes);
  test::GuardedBuffer workspace(bytes - 1, Fill::poison);
  const std::string why = test::error_of(
      [&] { backend.reserve(request.limits, workspace.bytes()); }, ErrorCode::workspace_too_small);
  EXPECT_TRUE(contains(why, std::to_string(bytes))) << why;
  EXPECT_TRUE(workspace.guards_intact());
}

// A second batch after the same reserve(), then the first again: no state remains.
TEST_P(Served, PlansLeaveNothingBehind) {
  const CaseData data = make_data(test());
  const std::vector<test::Piece> whole = whole_case(test());
  const std::vector<test::Piece> half(whole.begin(), whole.begin() + (whole.size() + 1) / 2);
  std::vector<test::Piece> backwards(whole.rbegin(), whole.rend());
  const std::vector<Output> outputs =
      run_batches(entry(), test(), data, {whole, half, backwards, {}, whole});
  EXPECT_TRUE(same_bits(outputs.front(), outputs.back()));
}

// A captured pass serves batches of other lengths, down to 0, with the bits of an eager pass.
TEST_P(Served, GraphReplayEqualsEager) {
  if (entry().graphs != GraphSupport::always) GTEST_SKIP() << "captures nothing";
  const CaseData data = make_data(test());
  const std::vector<test::Piece> whole = whole_case(test());
  std::vector<test::Piece> shorter = whole;
  // Other lengths, without every third request.
  for (size_t i = 0; i < shorter.size(); ++i) {
    const bool whole_only = test().spec.mask != MaskKind::none || test().prewritten;
    if (i % 3 == 1) shorter[i].end = 0;
    if (i % 3 == 2 && !whole_only) shorter[i].end = (shorter[i].end + 1) / 2;
  }
  const std::vector<std::vector<test::Piece>> batches = {whole, shorter, whole};
  ThreadPool threads(1);
  // Runs every batch over one store by calling `pass`.
  const auto run_all = [&](test::Tables tables, auto&& pass) {
    std::optional<test::PagedStore> store;
    if (test::is_cached(test().spec)) store.emplace(test(), data, Fill::zero);
    test::PagedStore* pages = store ? &*store : nullptr;
    test::BackendUnderTest under_test(entry(), test(), pages, threads);
    std::vector<std::unique_ptr<test::PackedBatch>> packed;
    std::vector<test::PackedBatch*> pointers;
    for (const auto& pieces : batches) {
      packed.push_back(
          std::make_unique<test::PackedBatch>(test(), data, pages, pieces, Fill::poison));
      packed.back()->take_bounds(*packed.front());
      packed.back()->give(tables);
      if (tables == test::Tables::pages) packed.back()->tell_host_lens();
      pointers.push_back(packed.back().get());
    }
    pass(under_test, pointers);
    EXPECT_TRUE(under_test.guards_intact());
    std::vector<Output> outputs;
    for (const auto& batch : packed) {
      outputs.push_back(batch->output());
      EXPECT_TRUE(batch->untouched_outside());
    }
    return outputs;
  };
  for (const test::Tables tables : {test::Tables::slots, test::Tables::pages}) {
    const auto eager = run_all(tables, [](auto& under_test, auto& list) {
      for (test::PackedBatch* batch : list) under_test.run(*batch);
    });
    const auto replayed =
        run_all(tables, [](auto& under_test, auto& list) { under_test.replay(list); });
    for (size_t i = 0; i < batches.size(); ++i) {
      EXPECT_TRUE(same_bits(replayed[i], eager[i]))
          << "replay " << i << (tables == test::Tables::pages ? " by pages" : "");
    }
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Served);
INSTANTIATE_TEST_SUITE_P(Builtin, Served, ::testing::ValuesIn(contracts()), test::served_case_name);

// A case of each kind of attention.
std::vector<ServedCase> kinds() {
  std::vector<AttentionCase> cases;
  for (const char* name : {"mixed", "decode_page_16", "encoder", "cross", "cascade", "mla_page_16",
                           "mla_weights_split_decode", "dual_chunk"}) {
    cases.push_back(test::attention_case(name));
  }
  return test::served_cases(cases);
}

class EveryKind : public Served {};

// Without this error, layers would use lists and tables of a previous batch.
TEST_P(EveryKind, APlanThatFailsLeavesNone) {
  const CaseData data = make_data(test());
  ThreadPool threads(1);
  std::optional<test::PagedStore> store;
  if (test::is_cached(test().spec)) store.emplace(test(), data, Fill::zero);
  test::PagedStore* pages = store ? &*store : nullptr;
  test::BackendUnderTest under_test(entry(), test(), pages, threads);
  AttentionBackend& backend = under_test.backend();
  test::PackedBatch batch(test(), data, pages, whole_case(test()), Fill::poison);
  EXPECT_EQ(test::error_of([&] { backend.forward(batch.tensors()); }), "forward() without a plan");
  under_test.run(batch);
  BatchView wrong = batch.view();
  wrong.requests = limits_of(test()).max_requests + 1;
  test::expect_invalid("requests is", [&] { backend.plan(wrong); });
  EXPECT_EQ(test::error_of([&] { backend.forward(batch.tensors()); }), "forward() without a plan");
  under_test.run(batch);
  EXPECT_TRUE(under_test.guards_intact());
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(EveryKind);
INSTANTIATE_TEST_SUITE_P(Builtin, EveryKind, ::testing::ValuesIn(kinds()), test::served_case_name);

class Refused : public ::testing::TestWithParam<AttentionCase> {};

// Reasons are given before anything is built, and no call can bypass them.
TEST_P(Refused, SayWhyAndCannotBeForced) {
  if (!test::why_no_test_device().empty()) GTEST_SKIP() << test::why_no_test_device();
  const AttentionCase& test = GetParam();
  const BackendRequest request = test::request_of(test);
  const BackendRegistry registry = BackendRegistry::builtin();
  ThreadPool threads(1);
  std::optional<test::PagedStore> store;
  if (test::is_cached(test.spec)) store.emplace(test, make_data(test), Fill::zero);
  BackendContext context;
  context.spec = test.spec;
  context.kv = store ? &store->pool() : nullptr;
  context.threads = &threads;
  context.device = test::test_device().device();

  for (const BackendEntry& entry : registry.entries()) {
    const std::vector<Reason> reasons = entry.reject(request);
    if (reasons.empty()) continue;
    SCOPED_TRACE(entry.name);
    EXPECT_THROW(entry.workspace_bytes(request), Error);
    EXPECT_THROW(entry.create(context), Error) << "created although it rejects";
    try {
      select_backend(registry, request, {Policy::require, entry.name});
      ADD_FAILURE() << "chosen although it rejects";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::unsupported);
      for (const Reason& reason : reasons) {
        EXPECT_FALSE(reason.text.empty());
        EXPECT_TRUE(contains(error.what(), reason.text)) << error.what();
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, Refused, ::testing::ValuesIn(test::attention_cases()),
                         [](const auto& param) { return param.param.name; });

// Every shared case has at least one backend, so that no case passes by being refused everywhere.
// On a GPU this excludes caches of another 16-bit type than the queries', dual chunks and some
// random combinations.
TEST(Contract, EveryCaseIsServed) {
  if (!test::why_no_test_device().empty()) GTEST_SKIP() << test::why_no_test_device();
  const BackendRegistry registry = BackendRegistry::builtin();
  for (const AttentionCase& test : test::attention_cases()) {
    const bool same_type = test.cache.dtype == test.spec.q_dtype || is_fp8(test.cache.dtype);
    const bool random = test.name.starts_with("random_");
    if (test::on_gpu() && (!same_type || test.spec.dual_chunk || random)) continue;
    EXPECT_NO_THROW(select_backend(registry, test::request_of(test))) << test.name;
  }
}

}  // namespace
}  // namespace fovea
