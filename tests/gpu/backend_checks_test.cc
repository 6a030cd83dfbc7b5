// SPDX-License-Identifier: Apache-2.0
// Checks of GPU backends that the contract of all backends cannot make: many random steps through
// one graph, warps that run at different speeds, invalid entries of the request table, and caches
// beyond 2^31 elements.
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <random>
#include <vector>

#include "fovea/gpu.h"
#include "gpu/gpu.h"
#include "support/cases.h"
#include "support/device_array.h"
#include "support/expect_close.h"
#include "support/run_backend.h"
#include "support/test_device.h"

namespace fovea {

// Prints an entry in failure messages.
static void PrintTo(const BackendEntry& entry, std::ostream* to) { *to << entry.name; }

namespace {

using test::AttentionCase;
using test::Fill;
using test::serves;
using test::to_device;

class BackendChecks : public ::testing::TestWithParam<BackendEntry> {};

// Returns a step of one token for some of the requests, at random positions in caches of 1 to 6000
// tokens.
std::vector<test::Piece> random_step(const AttentionCase& test, std::mt19937& random) {
  std::vector<test::Piece> pieces = whole_case(test);
  for (test::Piece& piece : pieces) {
    const int32_t q_len = piece.end;
    piece.begin = static_cast<int32_t>(random() % static_cast<uint32_t>(q_len));
    piece.end = piece.begin + (random() % 8 != 0);
  }
  std::ranges::shuffle(pieces, random);
  return pieces;
}

// Every step runs in the graph of the first step, then enqueued, then in the graph again.
TEST_P(BackendChecks, RandomDecodeStepsRepeatBitForBit) {
  AttentionCase test =
      serves(GetParam(), "mixed") ? test::mha_case("steps", 8, 2, 128) : test::mla_case("steps", 8);
  test.mode = ForwardMode::decode;
  test.prewritten = true;
  test.requests.clear();
  for (const int32_t length : {1, 17, 64, 65, 200, 1000, 2100, 6000}) {
    test.requests.push_back({std::min(length, 64), length});
  }
  const test::CaseData data = make_data(test);
  test::PagedStore store(test, data, Fill::poison, test::Written::all);
  ThreadPool threads(1);
  test::BackendUnderTest under_test(GetParam(), test, &store, threads, Fill::poison);
  std::mt19937 random(17);
  std::vector<std::vector<test::Piece>> steps(static_cast<size_t>(500 * test::test_scale()));
  for (auto& step : steps) step = random_step(test, random);
  steps.front() = whole_case(test);  // no later step has more tokens or keys
  for (test::Piece& piece : steps.front()) piece.begin = piece.end - 1;
  const auto batches = [&] {
    std::vector<test::PackedBatch> list;
    for (const auto& step : steps) list.emplace_back(test, data, &store, step, Fill::poison);
    return list;
  };
  const auto replayed = [&] {
    std::vector<test::PackedBatch> list = batches();
    std::vector<test::PackedBatch*> pointers;
    for (test::PackedBatch& batch : list) pointers.push_back(&batch);
    under_test.replay(pointers);
    std::vector<test::Output> outputs;
    for (test::PackedBatch& batch : list) outputs.push_back(batch.output());
    return outputs;
  };
  const std::vector<test::Output> first = replayed();
  const std::vector<test::Output> second = replayed();
  std::vector<test::PackedBatch> eager = batches();
  for (size_t i = 0; i < steps.size(); ++i) {
    under_test.run(eager[i]);
    ASSERT_TRUE(same_bits(first[i], second[i])) << "step " << i;
    ASSERT_TRUE(same_bits(first[i], eager[i].output())) << "step " << i;
    ASSERT_TRUE(std::ranges::none_of(first[i].out, [](float x) { return std::isnan(x); }))
        << "step " << i;
  }
  EXPECT_TRUE(under_test.guards_intact());
}

// Warps that share a ring of key tiles may be several steps apart, and a warp must not release a
// tile that another warp still reads. A span holds the query and all keys but the first 16; at
// these one warp falls behind, as it searches the other spans. A faulty kernel may hang.
TEST_P(BackendChecks, WarpsThatFallBehindKeepTheirKeys) {
  if (!serves(GetParam(), "prefix_spans")) GTEST_SKIP() << "has no spans";
  constexpr int32_t kSlowKeys = 16;
  constexpr int32_t kKeys = 2 * 128 + 16;  // the last step has keys for one of eight warps
  AttentionCase test = test::mha_case("behind", 4, 1, 128);
  test.spec.q_dtype = test.cache.dtype = DType::bf16;
  test.spec.mask = MaskKind::prefix_spans;
  test.cache.page_size = 64;
  test.requests.assign(static_cast<size_t>(2 * test::test_device().cores), {1, kKeys});
  test::CaseData data = make_data(test);
  for (test::RequestData& request : data.requests) {
    request.spans.assign(300, {0, 1});
    request.spans.front() = {kSlowKeys, kKeys};
  }
  const test::Output got = run_case(GetParam(), test, data, {.fill = Fill::poison});
  const size_t width = static_cast<size_t>(test.spec.q_heads) * 128;
  for (size_t request = 0; request < test.requests.size(); ++request) {
    EXPECT_TRUE(is_close(test.spec, oracle(test, data, request),
                         std::span(got.out).subspan(request * width, width), {}))
        << "request " << request;
  }
}

// A pool in device memory whose pages are `stride` elements apart.
class StridedPool final : public KvPool {
 public:
  StridedPool(const KvCacheSpec& spec, int64_t pages, int64_t stride, Device device)
      : spec_(spec),
        pages_(pages),
        device_(device),
        memory_(static_cast<size_t>(2 * pages * stride) * dtype_bytes(spec.dtype)) {
    gpu::fill_bytes(memory_.data(), 0xff, memory_.bytes(), nullptr);
    view_.dtype = spec.dtype;
    view_.page_size = spec.page_size;
    view_.slots = pages * spec.page_size;
    view_.k = memory_.data<char>();
    view_.v = view_.k + static_cast<int64_t>(memory_.bytes() / 2);
    view_.k_page_stride = view_.v_page_stride = stride;
    view_.k_token_stride = view_.v_token_stride = int64_t{spec.kv_heads} * spec.head_dim;
    view_.k_head_stride = view_.v_head_stride = spec.head_dim;
  }
  const KvCacheSpec& spec() const override { return spec_; }
  int64_t pages() const override { return pages_; }
  KvLayerView layer(int32_t) const override { return view_; }
  Device device() const override { return device_; }

 private:
  KvCacheSpec spec_;
  int64_t pages_;
  Device device_;
  gpu::DeviceBuffer memory_;
  KvLayerView view_;
};

// Prompts whose keys are stored and read back, then one more token for each, with given tables.
class SmallRun {
 public:
  static constexpr int32_t kHeads = 4, kKvHeads = 2, kDim = 64, kPage = 16;
  static constexpr int32_t kLength = 4 * kPage;  // tokens per request

  static AttentionSpec spec() {
    AttentionSpec spec;
    spec.q_heads = kHeads;
    spec.kv_heads = kKvHeads;
    spec.head_dim = spec.head_dim_v = kDim;
    spec.q_dtype = DType::bf16;
    return spec;
  }
  static KvCacheSpec cache() {
    KvCacheSpec cache;
    cache.dtype = DType::bf16;
    cache.layers = 1;
    cache.kv_heads = kKvHeads;
    cache.head_dim = cache.head_dim_v = kDim;
    cache.page_size = kPage;
    return cache;
  }

  // Returns the output of the prompts, then of the decodes. `table` holds [requests, kLength]
  // slots, or pages [requests, kLength / kPage] if entry_tokens is kPage.
  static std::vector<uint16_t> run(const BackendEntry& entry, KvPool& pool,
                                   const std::vector<int32_t>& table, int32_t entry_tokens = 1) {
    const auto requests = static_cast<int32_t>(table.size()) * entry_tokens / kLength;
    const int32_t tokens = requests * kLength;
    auto backend = entry.create({.spec = spec(), .kv = &pool, .device = pool.device()});
    backend->reserve({.max_requests = requests,
                      .max_tokens = tokens,
                      .max_q_len = kLength,
                      .max_kv_len = kLength});
    std::mt19937 random(5);
    const auto noise = [&](int32_t heads) {
      std::vector<uint16_t> values(static_cast<size_t>(tokens) * heads * kDim);
      // Bit patterns in [-2, 2) that are finite in bf16.
      for (uint16_t& value : values) {
        value = static_cast<uint16_t>((random() & 1) << 15 | 0x3f00 | (random() & 0xff));
      }
      return to_device(values);
    };
    const gpu::DeviceBuffer q = noise(kHeads), k = noise(kKvHeads), v = noise(kKvHeads);
    const size_t row = size_t{kHeads} * kDim;
    gpu::DeviceBuffer out(static_cast<size_t>(tokens + requests) * row * sizeof(uint16_t));
    std::vector<int32_t> rows(static_cast<size_t>(requests)), prompts{0}, singles{0};
    std::vector<int32_t> lens(rows.size(), kLength);
    for (int32_t i = 0; i < requests; ++i) {
      rows[static_cast<size_t>(i)] = i;
      prompts.push_back((i + 1) * kLength);
      singles.push_back(i + 1);
    }
    std::vector<int64_t> slots;
    for (const int64_t first : table) {
      for (int32_t n = 0; n < entry_tokens; ++n) slots.push_back(first * entry_tokens + n);
    }
    const auto table_device = to_device(table), rows_device = to_device(rows);
    const auto lens_device = to_device(lens), slots_device = to_device(slots);
    BatchView batch;
    batch.requests = requests;
    batch.kv_lens = lens_device.span<int32_t>();
    batch.request_rows = rows_device.span<int32_t>();
    batch.table = {.entries = table_device.data<int32_t>(),
                   .stride = entry_tokens > 1 ? kLength / kPage : kLength,
                   .entry_tokens = entry_tokens,
                   .rows = requests};
    batch.out_slots = slots_device.span<int64_t>();
    LayerTensors layer;
    layer.q = dense_rows(q.data(), DType::bf16, kHeads, kDim);
    layer.k = dense_rows(k.data(), DType::bf16, kKvHeads, kDim);
    layer.v = dense_rows(v.data(), DType::bf16, kKvHeads, kDim);
    const auto pass = [&](const std::vector<int32_t>& indptr, ForwardMode mode, bool save,
                          size_t first_row) {
      const auto indptr_device = to_device(indptr);
      batch.mode = mode;
      batch.tokens = indptr.back();
      batch.hints.max_q_len = indptr[1];
      batch.q_indptr = indptr_device.span<int32_t>();
      layer.save_kv = save;
      layer.out = dense_rows(out.data<uint16_t>() + first_row * row, DType::bf16, kHeads, kDim);
      backend->plan(batch);
      backend->forward(layer);
      gpu::synchronize(nullptr);
    };
    pass(prompts, ForwardMode::extend, true, 0);
    pass(singles, ForwardMode::decode, false, static_cast<size_t>(tokens));
    std::vector<uint16_t> values(out.bytes() / sizeof(uint16_t));
    gpu::copy_to_host(values.data(), out.data(), out.bytes(), nullptr);
    gpu::synchronize(nullptr);
    return values;
  }

  // Returns the pages of each request: request i has consecutive pages from first + i * step on.
  static std::vector<int32_t> table(int32_t requests, int32_t first) {
    std::vector<int32_t> slots;
    for (int32_t n = 0; n < requests * kLength; ++n) slots.push_back(first * kPage + n);
    return slots;
  }
};

TEST_P(BackendChecks, PagesBeyondTwoBillionElementsAreReached) {
  if (!serves(GetParam(), "mixed")) GTEST_SKIP() << "tests/gpu/mla_backend_test.cc has it";
  const gpu::Context context(test::test_device().index);
  context.bind();
  constexpr int64_t kFar = (int64_t{1} << 31) / 7 / 8 * 8;  // 16-byte aligned
  constexpr int32_t kRequests = 2, kPages = 1 + kRequests * SmallRun::kLength / SmallRun::kPage;
  const size_t needed = 4 * static_cast<size_t>(kFar) * kPages;
  if (context.free_bytes() < needed + (size_t{1} << 30)) {
    GTEST_SKIP() << needed << " bytes are not free";
  }
  const Device device = test::test_device().device();
  const auto table = SmallRun::table(kRequests, 1);
  StridedPool near(SmallRun::cache(), kPages,
                   int64_t{SmallRun::kPage} * SmallRun::kKvHeads * SmallRun::kDim, device);
  const auto want = SmallRun::run(GetParam(), near, table);
  StridedPool far(SmallRun::cache(), kPages, kFar, device);
  EXPECT_EQ(SmallRun::run(GetParam(), far, table), want);
}

// The host does not see a GPU's tables. Entries that name no slot must not be dereferenced, and the
// other requests keep their bits.
TEST_P(BackendChecks, WildEntriesHarmNobodyElse) {
  if (!serves(GetParam(), "mixed")) GTEST_SKIP() << "tests/gpu/mla_backend_test.cc has it";
  const gpu::Context context(test::test_device().index);
  context.bind();
  constexpr int32_t kRequests = 3, kPages = 1 + kRequests * SmallRun::kLength / SmallRun::kPage;
  constexpr int64_t kDense = int64_t{SmallRun::kPage} * SmallRun::kKvHeads * SmallRun::kDim;
  const Device device = test::test_device().device();
  const auto table = SmallRun::table(kRequests, 1);
  const auto run = [&](const std::vector<int32_t>& entries, int32_t entry_tokens) {
    StridedPool pool(SmallRun::cache(), kPages, kDense, device);
    return SmallRun::run(GetParam(), pool, entries, entry_tokens);
  };
  const auto want = run(table, 1);
  const auto expect_others = [&](const std::vector<uint16_t>& got, int32_t wild) {
    const size_t row = size_t{SmallRun::kHeads} * SmallRun::kDim;
    const size_t request = SmallRun::kLength * row, decodes = kRequests * request;
    const auto equal = [&](size_t begin, size_t count) {
      return std::equal(got.begin() + begin, got.begin() + begin + count, want.begin() + begin);
    };
    EXPECT_TRUE(equal(0, request) && equal(2 * request, request)) << wild << ", prompts";
    EXPECT_TRUE(equal(decodes, row) && equal(decodes + 2 * row, row)) << wild << ", decodes";
  };
  for (const int32_t wild : {-1, INT_MIN, INT_MAX, kPages * SmallRun::kPage}) {
    auto slots = table;
    for (int32_t n = 0; n < SmallRun::kLength; n += 3) {
      slots[static_cast<size_t>(SmallRun::kLength + n)] = wild;  // slots of request 1
    }
    expect_others(run(slots, 1), wild);
  }
  std::vector<int32_t> pages;
  for (int32_t page = 1; page < kPages; ++page) pages.push_back(page);
  EXPECT_EQ(run(pages, SmallRun::kPage), want);
  for (const int32_t wild : {-1, INT_MIN, INT_MAX, kPages}) {
    auto entries = pages;
    entries[SmallRun::kLength / SmallRun::kPage + 1] = wild;  // pages of request 1
    expect_others(run(entries, SmallRun::kPage), wild);
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(BackendChecks);
INSTANTIATE_TEST_SUITE_P(Builtin, BackendChecks, ::testing::ValuesIn(test::gpu_backends()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace fovea
