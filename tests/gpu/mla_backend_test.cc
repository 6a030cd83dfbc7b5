// SPDX-License-Identifier: Apache-2.0
// Backends `mla` and `portable_mla` beyond the shared cases: caches of several gigabytes, contexts
// of more than 100000 tokens, batches without requests. Skipped without a GPU that runs them.
#include "attention/cuda/mla_backend.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "attention/backends/backends.h"
#include "attention/cuda/mla_up_projected.h"
#include "attention/mla_forms.h"
#include "fovea/gpu.h"
#include "fovea/select_backend.h"
#include "gpu/gpu.h"
#include "kernels/cuda/kernel.h"
#include "kernels/cuda/portable/mla_prefill/launch.h"
#include "kernels/cuda/store.h"
#include "support/bf16_noise.h"
#include "support/cases.h"
#include "support/device_array.h"
#include "support/expect_close.h"
#include "support/expect_error.h"
#include "support/run_backend.h"

namespace fovea {
namespace {

using test::bf16_noise;
using test::to_device;
using test::to_host;

constexpr int32_t kHeads = 16;
constexpr int32_t kRank = 512;
constexpr int32_t kRow = 576;

struct Result {
  std::vector<uint16_t> out;
  std::vector<float> lse;
  bool operator==(const Result&) const = default;
};

class MlaBackend : public ::testing::TestWithParam<const MlaKernels*> {
 protected:
  void SetUp() override {
    if (!why_no_gpu().empty()) GTEST_SKIP() << why_no_gpu();
    context_ = std::make_unique<gpu::Context>(0);
    const int sm = context_->info().sm;
    if (sm < 80 || (GetParam() == &mla_kernels() && sm != 90)) GTEST_SKIP() << "sm_" << sm;
    spec_ = {.kind = AttentionKind::mla,
             .q_heads = kHeads,
             .kv_heads = 1,
             .q_dtype = DType::bf16,
             .needs_lse = true,
             .scores = {.softmax_scale = 0.05f},
             .mla = {.kv_lora_rank = kRank, .rope_dim = kRow - kRank}};
    cache_ = {.layout = KvLayout::mla,
              .dtype = DType::bf16,
              .layers = 1,
              .kv_heads = 1,
              .head_dim = kRow,
              .head_dim_v = kRank,
              .page_size = 64};
  }

  std::unique_ptr<AttentionBackend> create(KvPool& pool, const BatchLimits& limits) {
    const BackendRegistry registry = BackendRegistry::builtin();
    const Selection selection =
        select_backend(registry, {spec_, cache_, limits, context_->info()},
                       {.policy = Policy::require, .name = std::string(GetParam()->name)});
    EXPECT_EQ(selection.chosen->name, GetParam()->name);
    auto backend = selection.chosen->create({.spec = spec_, .kv = &pool, .device = pool.device()});
    backend->reserve(limits);
    return backend;
  }

  // Stores `kv_len` tokens in consecutive slots from `first_slot` on and decodes the last of them.
  Result decode(KvPool& pool, int64_t first_slot, int32_t kv_len) {
    const BatchLimits limits = {
        .max_requests = 1, .max_tokens = kv_len, .max_q_len = kv_len, .max_kv_len = kv_len};
    const auto backend = create(pool, limits);
    std::vector<int64_t> slots(static_cast<size_t>(kv_len));
    std::iota(slots.begin(), slots.end(), first_slot);
    const std::vector<int32_t> table(slots.begin(), slots.end());
    const auto out_slots = to_device(slots);
    const auto request_slots = to_device(table);
    const auto request_rows = to_device(std::vector<int32_t>{0});
    const auto kv_lens = to_device(std::vector<int32_t>{kv_len});
    const auto rows = to_device(bf16_noise(static_cast<size_t>(kv_len) * kRow, 3));
    const auto q = to_device(bf16_noise(size_t{kHeads} * kRow, 5));
    const gpu::DeviceBuffer out(size_t{kHeads} * kRank * 2), lse(size_t{kHeads} * 4);

    BatchView batch{
        .mode = ForwardMode::extend,
        .requests = 1,
        .tokens = kv_len,
        .kv_lens = kv_lens.span<int32_t>(),
        .request_rows = request_rows.span<int32_t>(),
        .table = {.entries = request_slots.data<int32_t>(), .stride = kv_len, .rows = 1},
        .out_slots = out_slots.span<int64_t>()};
    const auto all = to_device(std::vector<int32_t>{0, kv_len});
    batch.q_indptr = all.span<int32_t>();
    LayerTensors store;
    store.mla.latent = {rows.data(), DType::bf16, kRow, kRow};
    store.mla.k_rope = {rows.data<uint16_t>() + kRank, DType::bf16, kRow, kRow};
    backend->plan(batch);
    backend->forward(store);

    const auto last = to_device(std::vector<int32_t>{0, 1});
    batch.mode = ForwardMode::decode;
    batch.tokens = batch.hints.max_q_len = 1;
    batch.q_indptr = last.span<int32_t>();
    LayerTensors layer;
    layer.q = {q.data(), DType::bf16, kHeads * kRow, kRow};
    layer.out = {out.data(), DType::bf16, kHeads * kRank, kRank};
    layer.lse = NaturalLse(lse.data<float>());
    backend->plan(batch);
    backend->forward(layer);
    return {to_host<uint16_t>(out, size_t{kHeads} * kRank), to_host<float>(lse, kHeads)};
  }

  std::unique_ptr<gpu::Context> context_;
  AttentionSpec spec_;
  KvCacheSpec cache_;
};

// The same tokens at the front of the pool and after 2^31 of its elements, and more than 100000
// tokens.
TEST_P(MlaBackend, AddressesBeyondTwoToThe31Elements) {
  constexpr int32_t kLength = 131'000;
  constexpr int64_t kFar = (int64_t{1} << 31) / kRow / 64 * 64 + 64;
  const auto pool = make_kv_pool(cache_, (kFar + kLength) / 64 + 2, context_->info().device());
  const Result near = decode(*pool, 64, kLength);
  const Result far = decode(*pool, kFar, kLength);
  EXPECT_EQ(near, far);
  for (const float lse : near.lse) EXPECT_NEAR(lse, std::log(kLength), 1.0f);
}

// A pool with any number of pages, and batches without requests or tokens: nothing is written.
TEST_P(MlaBackend, EmptyBatchesDoNothing) {
  const auto pool = make_kv_pool(cache_, 3, context_->info().device());
  const auto backend = create(*pool, {.max_requests = 4, .max_tokens = 4, .max_kv_len = 64});
  LayerTensors layer;
  backend->plan({.mode = ForwardMode::idle});
  backend->forward(layer);
  backend->plan({.mode = ForwardMode::decode});
  backend->forward(layer);
  gpu::synchronize(nullptr);
}

// Entries of the request table that name no slot of the pool affect at most their own request.
TEST_P(MlaBackend, WildEntriesHarmNobodyElse) {
  constexpr int32_t kLength = 200, kPages = 16;
  const auto pool = make_kv_pool(cache_, kPages, context_->info().device());
  decode(*pool, 64, kLength);  // stores the keys
  const auto backend = create(*pool, {.max_requests = 2, .max_tokens = 2, .max_kv_len = kLength});
  const auto q_indptr = to_device(std::vector<int32_t>{0, 1, 2});
  const auto kv_lens = to_device(std::vector<int32_t>{kLength, kLength});
  const auto rows = to_device(std::vector<int32_t>{0, 1});
  const auto q = to_device(bf16_noise(size_t{2} * kHeads * kRow, 5));
  const gpu::DeviceBuffer out(size_t{2} * kHeads * kRank * 2);
  // Returns the first request's results in a batch with a request whose table has `entries`.
  const auto result_with = [&](const std::vector<int32_t>& entries) {
    std::vector<int32_t> table(2 * kLength);
    for (int32_t i = 0; i < kLength; ++i) {
      table[i] = 64 + i;
      table[kLength + i] = entries[static_cast<size_t>(i) % entries.size()];
    }
    const auto request_slots = to_device(table);
    backend->plan(
        {.mode = ForwardMode::decode,
         .requests = 2,
         .tokens = 2,
         .q_indptr = q_indptr.span<int32_t>(),
         .kv_lens = kv_lens.span<int32_t>(),
         .request_rows = rows.span<int32_t>(),
         .table = {.entries = request_slots.data<int32_t>(), .stride = kLength, .rows = 2}});
    LayerTensors layer;
    layer.q = {q.data(), DType::bf16, kHeads * kRow, kRow};
    layer.out = {out.data(), DType::bf16, kHeads * kRank, kRank};
    backend->forward(layer);
    return to_host<uint16_t>(out, size_t{kHeads} * kRank);
  };
  const std::vector<uint16_t> wanted = result_with({64});
  constexpr int32_t kMinEntry = std::numeric_limits<int32_t>::min();
  constexpr int32_t kMaxEntry = std::numeric_limits<int32_t>::max();
  EXPECT_EQ(result_with({-1, kMinEntry, kPages * 64, kMaxEntry}), wanted);
  EXPECT_EQ(result_with({kMaxEntry}), wanted);
}

// The error names wrong arguments before anything is enqueued.
TEST_P(MlaBackend, WrongTensorsAreNamed) {
  spec_.mla.nope_dim = spec_.mla.v_dim = 128;
  const auto pool = make_kv_pool(cache_, 3, context_->info().device());
  const auto backend = create(*pool, {.max_requests = 1, .max_tokens = 1, .max_kv_len = 64});
  const gpu::DeviceBuffer memory(size_t{kHeads} * kRow * 2);
  const auto numbers = to_device(std::vector<int32_t>{0, 1});
  backend->plan({.mode = ForwardMode::decode,
                 .requests = 1,
                 .tokens = 1,
                 .q_indptr = numbers.span<int32_t>(),
                 .kv_lens = numbers.span<int32_t>(),
                 .request_rows = numbers.span<int32_t>(),
                 .table = {.entries = numbers.data<int32_t>(),
                           .stride = 1,
                           .entry_tokens = cache_.page_size,
                           .rows = 1}});
  const HeadRows rows = {memory.data(), DType::bf16, kHeads * 192, 192};
  const LayerTensors good = {
      .q = rows,
      .out = rows,
      .mla = {.weights = {.dtype = DType::bf16, .w_uk = memory.data(), .w_uv = memory.data()}}};
  const auto names = [&](const char* words, auto change) {
    LayerTensors layer = good;
    change(layer);
    test::expect_invalid(words, [&] { backend->forward(layer); });
  };
  names("mla.weights are null", [](LayerTensors& t) { t.mla.weights = {}; });
  names("half given", [](LayerTensors& t) { t.mla.weights.w_uv = nullptr; });
  names("mla.weights are fp32", [](LayerTensors& t) { t.mla.weights.dtype = DType::f32; });
  names("w_uk_head_stride is 3", [](LayerTensors& t) { t.mla.weights.w_uk_head_stride = 3; });
  names("w_uv is at", [&](LayerTensors& t) { t.mla.weights.w_uv = memory.data<std::byte>() + 2; });
  names("q is fp16", [](LayerTensors& t) { t.q.dtype = DType::f16; });
  names("a stride of q is 3", [](LayerTensors& t) { t.q.head_stride = 3; });
  names("layer is 1, the pool has 1", [](LayerTensors& t) { t.layer = 1; });
}

// The device and the host choose the same forms, and rows beyond the limit stay absorbed.
TEST_P(MlaBackend, FormsAreThoseOfTheCostModel) {
  namespace cuda = kernels::cuda;
  spec_.mla.nope_dim = spec_.mla.v_dim = 128;
  std::mt19937 random(9);
  std::vector<int32_t> q_indptr = {0}, kv_lens;
  for (int32_t i = 0; i < 3000; ++i) {
    const auto q_len = static_cast<int32_t>(random() % (i % 3 == 0 ? 400 : 40));
    const auto context = static_cast<int32_t>(random() % (i % 2 == 0 ? 60 : 5000));
    q_indptr.push_back(q_indptr.back() + q_len);
    kv_lens.push_back(q_len + context - (i % 100 == 7 ? context + q_len / 2 : 0));
  }
  const auto requests = static_cast<int32_t>(kv_lens.size());
  const cuda::MlaPrefillSteps steps(DType::bf16, DType::bf16, context_->info().sm,
                                    cuda::kernel_store());
  const auto device_indptr = to_device(q_indptr), device_lens = to_device(kv_lens);
  const gpu::DeviceBuffer up_requests(requests), up_tokens(q_indptr.back()), new_lens(requests * 4),
      row_indptr((requests + 1) * 4), live_rows(4), begin(requests * 4), chunk_lens(requests * 4),
      chunk_indptr((requests + 1) * 4);
  constexpr int32_t kChunkRows = 10'000;
  struct Setting {
    int32_t most;
    bool at_once;
    int32_t by_q_len = 0;  // up-projected from this many new tokens on; 0: by cost
  };
  for (const auto& [most, at_once, by_q_len] : {Setting{0, false},
                                                {20'000, false},
                                                {1 << 30, false},
                                                {0, true},
                                                {20'000, true},
                                                {1 << 30, true},
                                                {1 << 30, false, 2},
                                                {20'000, true, 40},
                                                {1 << 30, true, 1}}) {
    const auto rows_of = [&](size_t i) {
      return at_once ? kv_lens[i] : kv_lens[i] - (q_indptr[i + 1] - q_indptr[i]);
    };
    steps.choose_forms({.q_indptr = device_indptr.data<int32_t>(),
                        .kv_lens = device_lens.data<int32_t>(),
                        .requests = requests,
                        .kv_lora_rank = kRank,
                        .nope_dim = spec_.mla.nope_dim,
                        .v_dim = spec_.mla.v_dim,
                        .min_q_len = by_q_len > 0 ? by_q_len : kMinUpProjected,
                        .by_q_len = by_q_len > 0,
                        .at_once = at_once,
                        .max_rows = most,
                        .up_requests = up_requests.data<uint8_t>(),
                        .up_tokens = up_tokens.data<uint8_t>(),
                        .new_lens = new_lens.data<int32_t>(),
                        .row_indptr = row_indptr.data<int32_t>(),
                        .chunk = {.live_rows = live_rows.data<int32_t>(),
                                  .begin = begin.data<int32_t>(),
                                  .lens = chunk_lens.data<int32_t>(),
                                  .indptr = chunk_indptr.data<int32_t>(),
                                  .max_rows = kChunkRows}},
                       nullptr);
    const auto chosen = to_host<uint8_t>(up_requests, requests);
    const auto tokens = to_host<uint8_t>(up_tokens, q_indptr.back());
    const auto lens = to_host<int32_t>(new_lens, requests);
    const auto row_begins = to_host<int32_t>(row_indptr, requests + 1);
    int64_t wanted = 0;
    int32_t taken = 0;
    for (int32_t i = 0; i < requests; ++i) {
      const int32_t q_len = q_indptr[i + 1] - q_indptr[i];
      bool up = by_q_len > 0 ? q_len >= by_q_len
                             : choose_mla_form(spec_, q_len, kv_lens[i]) == MlaForm::up_projected;
      up = up && kv_lens[i] >= q_len;
      if (up) wanted += rows_of(i);
      up = up && wanted <= most;
      ASSERT_EQ(chosen[i], up) << q_len << " new of " << kv_lens[i];
      ASSERT_EQ(lens[i], up ? q_len : 0);
      ASSERT_EQ(row_begins[i], taken);
      if (up) taken += rows_of(i);
      for (int32_t t = q_indptr[i]; t < q_indptr[i + 1]; ++t) ASSERT_EQ(tokens[t], up);
    }
    EXPECT_EQ(row_begins[requests], taken);
    EXPECT_LE(taken, most);
    // The first chunk.
    EXPECT_EQ(to_host<int32_t>(live_rows, 1)[0], std::min(taken, kChunkRows));
    const auto begins = to_host<int32_t>(begin, requests);
    const auto rows = to_host<int32_t>(chunk_lens, requests);
    for (int32_t i = 0; i < requests; ++i) {
      const int32_t end = std::min(row_begins[i + 1], kChunkRows);
      ASSERT_EQ(rows[i], std::max(end - row_begins[i], 0));
      if (rows[i] > 0) {
        ASSERT_EQ(begins[i], row_begins[i]);
      }
    }
    EXPECT_EQ(to_host<int32_t>(chunk_indptr, requests + 1),
              taken > 0 ? q_indptr : std::vector<int32_t>(q_indptr.size(), 0));
    EXPECT_EQ(taken > 0, most > 0);
  }
}

// Contexts in many chunks, with the ends of several requests in one of them; in one chunk; and
// together with the new tokens. For all three heads together and for each by itself; some of them
// over fp8 rows too.
TEST_P(MlaBackend, ChunksOfContextAddUp) {
  struct Split {
    bool split;
    std::optional<UpProjectedRoom> room;
    bool fp8_rows = false;
  };
  for (const auto& [split, room, fp8_rows] : {Split{false, UpProjectedRoom{504, 3 * 504}},
                                              {true, UpProjectedRoom{504, 3 * 504}},
                                              {true, UpProjectedRoom{504, 504}},
                                              {false, UpProjectedRoom{8300, 3 * 8300}},
                                              {true, UpProjectedRoom{8300, 3 * 8300}},
                                              {false, UpProjectedRoom{8300, 8300}},
                                              {false, {}},
                                              {false, UpProjectedRoom{8400, 8400}},
                                              {true, UpProjectedRoom{8400, 8400}},
                                              {true, UpProjectedRoom{504, 504}, true},
                                              {false, UpProjectedRoom{8400, 8400}, true}}) {
    test::AttentionCase test = test::mla_case(split ? "split_q_strided" : "joined", 3);
    test.spec.mla.nope_dim = test.spec.mla.v_dim = 128;
    test.spec.scores.softmax_scale = 0;
    if (fp8_rows) {
      test.cache.layout = KvLayout::mla_fp8_rows;
      test.cache.dtype = DType::f8e4m3;
    }
    test.cache.page_size = split ? 3 : 64;
    test.split_q = test.strided = split;
    test.requests = {{170, 900}, {3, 50}, {175, 1200}, {1, 300}, {20, 30}, {0, 0}, {135, 165}};
    BackendEntry entry = *BackendRegistry::builtin().find(GetParam()->name);
    entry.workspace_bytes = [room](const BackendRequest& request) {
      return mla_workspace_bytes(*GetParam(), request.spec, request.cache, request.device,
                                 request.limits, room);
    };
    entry.create = [room](const BackendContext& context) {
      return make_mla_backend(*GetParam(), context, room);
    };
    // The maximum that the batch can have.
    const UpProjectedRoom usual = up_projected_room(*GetParam(), test.spec, test.cache.dtype,
                                                    context_->info(), test::limits_of(test));
    EXPECT_EQ(usual.rows, 8400);
    EXPECT_EQ(usual.head_rows, 3 * 8400);
    const test::CaseData data = make_data(test);
    const test::Output got = run_case(entry, test, data, {.fill = test::Fill::poison});
    size_t row = 0;
    for (size_t request = 0; request < test.requests.size(); ++request) {
      const size_t count = static_cast<size_t>(test.requests[request].q_len) * 3;
      EXPECT_TRUE(is_close(test.spec, oracle(test, data, request),
                           std::span(got.out).subspan(row * 128, count * 128),
                           std::span(got.lse).subspan(row, count)))
          << test.name << ", room for " << (room ? room->rows : 0) << " rows, "
          << (room ? room->head_rows : 0) << " of heads, " << (fp8_rows ? "fp8 rows" : "bf16")
          << ", request " << request;
      row += count;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Both, MlaBackend,
                         ::testing::Values(&mla_kernels(), &portable_mla_kernels()),
                         [](const auto& test) { return std::string(test.param->name); });

}  // namespace
}  // namespace fovea
