// SPDX-License-Identifier: Apache-2.0
// Batch-invariant mode: the bits of a row depend on its own tokens only. They do not depend on the
// rest of the batch, its order or the limits, on how a prompt was chunked, on which tokens were
// cached, or on the threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <memory>
#include <random>
#include <vector>

#include "support/cases.h"
#include "support/error_budget.h"
#include "support/expect_close.h"
#include "support/run_backend.h"
#include "support/served_case.h"
#include "support/test_device.h"

namespace fovea {
namespace {

using test::AttentionCase;
using test::CaseData;
using test::Fill;
using test::Output;
using test::Piece;
using test::ServedCase;

// Cases with features that could change the order of summation.
std::vector<AttentionCase> invariant_cases() {
  std::vector<AttentionCase> cases;
  for (const char* name :
       {"mixed", "q_bf16_kv_bf16", "q_fp32_kv_fp8_e4m3_per_token_head", "window_16", "chunk_48",
        "sinks_window", "alibi", "logit_cap", "prefix_spans", "group_7", "group_28",
        "head_dim_192_128", "dual_chunk_sinks_cap_window", "q_fp8_per_head", "fp8_pages_scaled_64",
        "mla_fp8_rows", "mla_page_16", "mla_bf16", "mla_weights"}) {
    AttentionCase test = test::attention_case(name);
    test.spec.batch_invariant = true;
    test.mode = ForwardMode::mixed;
    cases.push_back(test);
  }
  return cases;
}

// Lengths around multiples of 480, 512 and 1024 keys, which kernels may sum separately.
constexpr int32_t kLengths[] = {959,  960,  961,  1023, 1024, 1025, 1920, 1921,
                                2047, 2048, 2049, 2881, 3072, 3073, 3100};
constexpr int32_t kLongest = 3100;

// Cases with rows of several segments next to other rows.
std::vector<AttentionCase> long_cases() {
  std::vector<AttentionCase> cases;
  const auto add = [&](const char* name, int32_t head_dim, auto change) {
    AttentionCase test = test::mha_case(name, 4, 1, head_dim);
    test.cache.page_size = 64;
    test.spec.batch_invariant = true;
    test.requests = {{kLongest, kLongest}, {1, 1}, {1, 1500}, {1, 2500}, {3, 3000},
                     {70, 1100},           {1, 40}};
    change(test);
    cases.push_back(test);
  };
  add("long_64", 64, [](AttentionCase&) {});
  add("long_128", 128, [](AttentionCase&) {});
  add("long_window", 128, [](AttentionCase& test) { test.spec.window = 1500; });
  add("long_sinks", 128, [](AttentionCase& test) { test.spec.scores.has_sinks = true; });
  // Scores with such a spread that the running maximum changes often.
  add("long_steep", 128, [](AttentionCase& test) { test.spec.scores.softmax_scale = 1; });
  // Enough scores of similar size after a rise that the last bit of their sum shows how it was
  // rounded.
  add("long_rising", 128, [](AttentionCase& test) { test.spec.scores.softmax_scale = 0.4F; });
  add("long_cap", 64, [](AttentionCase& test) { test.spec.scores.logit_cap = 20; });
  // Caps that some scores of some key tiles approach, so that tiles take different paths.
  add("long_cap_steep", 128, [](AttentionCase& test) {
    test.spec.scores.logit_cap = 20;
    test.spec.scores.softmax_scale = 0.3F;
  });
  add("long_alibi", 128, [](AttentionCase& test) { test.spec.scores.has_alibi = true; });
  add("long_group_7", 128, [](AttentionCase& test) { test.spec.q_heads = 7; });
  add("long_page_1", 64, [](AttentionCase& test) { test.cache.page_size = 1; });
  return cases;
}

std::vector<ServedCase> invariants(const std::vector<AttentionCase>& cases) {
  std::vector<ServedCase> served = test::served_cases(cases);
  std::erase_if(served, [](const ServedCase& invariant) {  // slow
    return invariant.entry.name == "reference" && invariant.test.requests[0].q_len > 1000;
  });
  return served;
}

// The rows of one piece of a batch.
struct Rows {
  std::vector<float> out, lse;
  bool operator==(const Rows&) const = default;
};

Rows rows_of(const AttentionCase& test, const Output& output, const std::vector<Piece>& pieces,
             size_t piece) {
  const auto heads = static_cast<size_t>(test.spec.q_heads);
  const auto width = static_cast<size_t>(test::out_width(test.spec));
  size_t begin = 0;
  for (size_t before = 0; before < piece; ++before) {
    begin += static_cast<size_t>(pieces[before].end - pieces[before].begin) * heads;
  }
  const size_t rows = static_cast<size_t>(pieces[piece].end - pieces[piece].begin) * heads;
  const auto slice = [&](const std::vector<float>& from, size_t size) {
    return std::vector<float>(from.begin() + begin * size, from.begin() + (begin + rows) * size);
  };
  return {slice(output.out, width), slice(output.lse, 1)};
}

class BatchInvariance : public ::testing::TestWithParam<ServedCase> {
 protected:
  const BackendEntry& entry() const { return GetParam().entry; }
};

// Requests of every length: all in one batch, then each alone and in random batches of several
// sizes.
struct Regrouped {
  AttentionCase test;
  std::vector<std::vector<Piece>> batches;  // all requests first
};

Regrouped regroup(const ServedCase& served) {
  Regrouped regrouped{served.test, {}};
  const int32_t count = test::is_mla(served.test.spec)     ? 16
                        : served.entry.name == "reference" ? 64
                                                           : 256;
  regrouped.test.requests.clear();
  for (int32_t i = 0; i < count; ++i) {
    const int32_t q_len = i % 4 == 3 ? 1 + i % 9 : 1;
    // Two requests are so long that plans would divide them.
    regrouped.test.requests.push_back({q_len, q_len + (i < 2 ? 3000 - 1400 * i : i * 37 % 150)});
  }
  const std::vector<Piece> whole = whole_case(regrouped.test);
  regrouped.batches = {whole};
  std::mt19937 random(7);
  for (size_t size : {size_t{1}, size_t{2}, size_t{7}, size_t{64}, whole.size()}) {
    std::vector<Piece> shuffled = whole;
    std::shuffle(shuffled.begin(), shuffled.end(), random);
    for (size_t begin = 0; begin < shuffled.size(); begin += size) {
      const size_t end = std::min(begin + size, shuffled.size());
      regrouped.batches.emplace_back(shuffled.begin() + begin, shuffled.begin() + end);
    }
  }
  return regrouped;
}

// Calls check(rows of a request in a batch, the same rows among all requests).
template <typename Check>
void compare_regrouped(const BackendEntry& entry, const Regrouped& regrouped, Check&& check) {
  const auto& [test, batches] = regrouped;
  const std::vector<Output> outputs = run_batches(entry, test, make_data(test), batches);
  for (size_t batch = 1; batch < batches.size(); ++batch) {
    for (size_t piece = 0; piece < batches[batch].size(); ++piece) {
      SCOPED_TRACE(testing::Message() << "request " << batches[batch][piece].request
                                      << " in a batch of " << batches[batch].size());
      check(rows_of(test, outputs[batch], batches[batch], piece),
            rows_of(test, outputs[0], batches[0], batches[batch][piece].request));
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST_P(BatchInvariance, OtherRequestsChangeNoBit) {
  compare_regrouped(entry(), regroup(GetParam()),
                    [](const Rows& got, const Rows& want) { EXPECT_EQ(got, want); });
}

// Without the mode other requests may change the last bits: two units in the last place of a row's
// largest value.
TEST_P(BatchInvariance, WithoutItOtherRequestsChangeLastBitsOnly) {
  if (test::on_gpu()) GTEST_SKIP() << "kernels there are chosen by the batch";
  Regrouped regrouped = regroup(GetParam());
  regrouped.test.spec.batch_invariant = false;
  const double ulp = 2 * test::error_budget(regrouped.test.spec.q_dtype).unit;
  const auto width = static_cast<size_t>(test::out_width(regrouped.test.spec));
  const auto largest = [width](const std::vector<float>& values, size_t row) {
    const auto first = values.begin() + static_cast<int64_t>(row);
    return std::fabs(
        *std::max_element(first, first + static_cast<int64_t>(width),
                          [](float a, float b) { return std::fabs(a) < std::fabs(b); }));
  };
  compare_regrouped(entry(), regrouped, [&](const Rows& got, const Rows& want) {
    for (size_t i = 0; i < want.out.size(); ++i)
      EXPECT_TRUE(
          test::is_near(got.out[i], want.out[i], 2 * ulp * largest(want.out, i / width * width)));
    for (size_t i = 0; i < want.lse.size(); ++i) {
      EXPECT_TRUE(
          test::is_near(got.lse[i], want.lse[i], 0x1p-22 * std::max(1.0f, std::fabs(want.lse[i]))));
    }
  });
}

// The same prompt in pieces of any size down to one token, on any number of threads, by slots and
// by pages.
TEST_P(BatchInvariance, ChunkingChangesNoBit) {
  AttentionCase test = GetParam().test;
  if (test.spec.mask == MaskKind::prefix_spans) {
    GTEST_SKIP() << "a span must not be cut: its tokens see each other";
  }
  constexpr int32_t kLength = 150;
  test.requests = {{kLength, kLength}};
  const CaseData data = make_data(test);
  const Output whole = run_case(entry(), test, data, {.fill = Fill::zero, .threads = 1});
  int threads = 1;
  test::Tables tables = test::Tables::slots;
  for (int32_t size : {1, 7, 16, 64, 149}) {
    std::vector<std::vector<Piece>> batches;
    for (int32_t begin = 0; begin < kLength; begin += size) {
      batches.push_back({{0, begin, std::min(begin + size, kLength)}});
    }
    tables = tables == test::Tables::slots ? test::Tables::pages : test::Tables::slots;
    const std::vector<Output> outputs = run_batches(
        entry(), test, data, batches, {.fill = Fill::poison, .threads = threads, .tables = tables});
    Output joined;
    for (const Output& output : outputs) {
      joined.out.insert(joined.out.end(), output.out.begin(), output.out.end());
      joined.lse.insert(joined.lse.end(), output.lse.begin(), output.lse.end());
    }
    EXPECT_TRUE(same_bits(whole, joined)) << "chunks of " << size << ", " << threads << " threads";
    threads = threads % 3 + 1;
  }
}

// A request with a cached prefix, under other limits, continues with the same bits.
TEST_P(BatchInvariance, CachedPrefixChangesNoBit) {
  AttentionCase test = GetParam().test;
  test.requests = {{130, 130}, {65, 65}, {1, 1}};
  const CaseData data = make_data(test);
  const Output cold = run_case(entry(), test, data);

  AttentionCase warm = test;
  warm.requests = {{21, 130}};
  CaseData tail;
  tail.w_uk = data.w_uk;
  tail.w_uv = data.w_uv;
  tail.sinks = data.sinks;
  tail.alibi_slopes = data.alibi_slopes;
  tail.requests = {data.requests[0]};
  test::RequestData& request = tail.requests[0];
  request.q_len = 21;
  for (std::vector<float>* rows :
       {&request.q, &request.q_succ, &request.q_inter, &request.q_scale}) {
    const size_t row = rows->size() / 130;
    rows->erase(rows->begin(), rows->begin() + static_cast<int64_t>(row * 109));
  }
  const Output hit = run_case(entry(), warm, tail, {.tables = test::Tables::pages});

  const std::vector<Piece> pieces = {{0, 0, 109}, {0, 109, 130}};
  EXPECT_EQ(rows_of(test, cold, pieces, 1), rows_of(warm, hit, whole_case(warm), 0));
}

class LongRows : public BatchInvariance {};

// A row computed with all others of its prompt, as a decode, at the end of an extend, alone and
// with other requests.
TEST_P(LongRows, AnyBatchGivesTheSameBits) {
  const AttentionCase& test = GetParam().test;
  const CaseData data = make_data(test);
  const std::vector<Piece> whole = whole_case(test);
  std::vector<std::vector<Piece>> batches = {whole};
  for (const int32_t length : kLengths) {
    for (const int32_t tokens : {1, 2, 4, 200}) {
      batches.push_back({{0, length - tokens, length}});
      batches.push_back(whole);
      batches.back().front() = {0, length - tokens, length};
    }
  }
  const std::vector<Output> outputs =
      run_batches(entry(), test, data, batches, {.fill = Fill::zero});
  for (size_t batch = 1; batch < batches.size(); ++batch) {
    const Piece& piece = batches[batch].front();
    const std::vector<Piece> cut = {{0, 0, piece.begin}, piece};
    ASSERT_EQ(rows_of(test, outputs[batch], batches[batch], 0), rows_of(test, outputs[0], cut, 1))
        << "tokens " << piece.begin << " to " << piece.end << " in a batch of "
        << batches[batch].size();
    for (size_t other = 1; other < batches[batch].size(); ++other) {
      ASSERT_EQ(rows_of(test, outputs[batch], batches[batch], other),
                rows_of(test, outputs[0], whole, other))
          << "request " << other << " next to tokens to " << piece.end;
    }
  }
}

// One captured pass serves all lengths with the same bits.
TEST_P(LongRows, ReplaysGiveTheSameBits) {
  if (!test::on_gpu()) GTEST_SKIP() << "graphs are a GPU's";
  const AttentionCase& test = GetParam().test;
  const CaseData data = make_data(test);
  ThreadPool threads(1);
  test::PagedStore store(test, data, Fill::zero);
  test::BackendUnderTest under_test(entry(), test, &store, threads, Fill::poison);
  const std::vector<Piece> whole = whole_case(test);
  test::PackedBatch prompt(test, data, &store, whole, Fill::poison);
  under_test.run(prompt);
  const Output want = prompt.output();
  std::vector<std::unique_ptr<test::PackedBatch>> decodes;
  std::vector<test::PackedBatch*> pointers;
  // The longest is captured.
  const std::vector<int32_t> lengths(std::rbegin(kLengths), std::rend(kLengths));
  for (const int32_t length : lengths) {
    const std::vector<Piece> pieces = {{0, length - 1, length}, {2, 0, 1}};
    decodes.push_back(
        std::make_unique<test::PackedBatch>(test, data, &store, pieces, Fill::poison));
    pointers.push_back(decodes.back().get());
  }
  under_test.replay(pointers);
  for (size_t i = 0; i < lengths.size(); ++i) {
    const std::vector<Piece> cut = {{0, 0, lengths[i] - 1}, {0, lengths[i] - 1, lengths[i]}};
    EXPECT_EQ(rows_of(test, decodes[i]->output(), {cut[1]}, 0), rows_of(test, want, cut, 1))
        << "length " << lengths[i];
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LongRows);
INSTANTIATE_TEST_SUITE_P(Builtin, LongRows, ::testing::ValuesIn(invariants(long_cases())),
                         test::served_case_name);

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(BatchInvariance);
INSTANTIATE_TEST_SUITE_P(Builtin, BatchInvariance,
                         ::testing::ValuesIn(invariants(invariant_cases())),
                         test::served_case_name);

}  // namespace
}  // namespace fovea
