// SPDX-License-Identifier: Apache-2.0
// Requests with more new tokens than keys. On a GPU the host does not see lengths, so plan() cannot
// refuse them. Skipped without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/float_types.h"
#include "fovea/select_backend.h"
#include "support/cases.h"
#include "support/device_array.h"
#include "support/expect_close.h"
#include "support/run_backend.h"
#include "support/test_device.h"

namespace fovea {
namespace {

using test::to_device;
using test::to_host;

constexpr int32_t kHeads = 4, kKvHeads = 2;
constexpr int32_t kMaxTokens = 320;  // tokens and keys per request
constexpr float kNone = -std::numeric_limits<float>::infinity();

using Requests = std::vector<std::pair<int32_t, int32_t>>;  // new tokens, keys

struct Shape {
  std::string name;
  int32_t head_dim, page_size;
  bool batch_invariant = false;
  int32_t window = 0;
  DType cache = DType::bf16;
};

// The rows of a request: [tokens, heads, head_dim] and [tokens, heads].
struct Rows {
  std::vector<float> out, lse;
};

// Requests over a cache that holds kMaxTokens keys for each.
class EarlyRun {
 public:
  EarlyRun(const BackendEntry& entry, const Shape& shape, Requests requests)
      : shape_(shape), requests_(std::move(requests)), width_(size_t{kHeads} * shape.head_dim) {
    const auto count = static_cast<int32_t>(requests_.size());
    test::AttentionCase test = test::mha_case("early", kHeads, kKvHeads, shape.head_dim);
    test.spec.q_dtype = DType::bf16;
    test.spec.needs_lse = true;
    test.spec.batch_invariant = shape.batch_invariant;
    test.spec.window = shape.window;
    test.cache.dtype = shape.cache;
    test.cache.page_size = shape.page_size;
    const Device device = test::test_device().device();
    pool_ = make_kv_pool(test::request_of(test).cache, 1 + count * (kMaxTokens / shape.page_size),
                         device);
    backend_ = entry.create({.spec = test.spec, .kv = pool_.get(), .device = device});
    backend_->reserve({.max_requests = count,
                       .max_tokens = count * kMaxTokens,
                       .max_q_len = kMaxTokens,
                       .max_kv_len = kMaxTokens});
    std::vector<int32_t> slots(static_cast<size_t>(count * kMaxTokens));
    std::iota(slots.begin(), slots.end(), shape.page_size);
    slots_ = to_device(slots);
    out_slots_ = to_device(std::vector<int64_t>(slots.begin(), slots.end()));
    std::mt19937 random(3);
    noise_.resize(slots.size() * width_);
    // Magnitudes from 0.5 to 2.
    for (uint16_t& bits : noise_) bits = static_cast<uint16_t>(0x3f00 | (random() & 0x80ff));
    store_keys();
  }

  // Attends with requests [first, end), or, if `seeing`, only with their tokens that have a key.
  std::vector<Rows> attend(size_t first, size_t end, bool seeing) {
    std::vector<int32_t> indptr{0}, lens, rows;
    std::vector<uint16_t> q;
    for (size_t i = first; i < end; ++i) {
      const auto [tokens, keys] = requests_[i];
      const size_t begin =
          i * kMaxTokens + static_cast<size_t>(seeing ? std::max(tokens - keys, 0) : 0);
      const size_t behind = i * kMaxTokens + static_cast<size_t>(tokens);
      const auto row = [&](size_t at) {
        return noise_.begin() + static_cast<int64_t>(at * width_);
      };
      q.insert(q.end(), row(begin), row(behind));
      indptr.push_back(indptr.back() + static_cast<int32_t>(behind - begin));
      lens.push_back(keys);
      rows.push_back(static_cast<int32_t>(i));
    }
    const auto lse_count = static_cast<size_t>(indptr.back() * kHeads);
    const auto q_device = to_device(q);
    const gpu::DeviceBuffer out(q.size() * sizeof(uint16_t)), lse(lse_count * sizeof(float));
    gpu::fill_bytes(out.data(), 0xff, out.bytes(), nullptr);
    gpu::fill_bytes(lse.data(), 0xff, lse.bytes(), nullptr);
    LayerTensors layer;
    layer.q = dense_rows(q_device.data(), DType::bf16, kHeads, shape_.head_dim);
    layer.out = dense_rows(out.data(), DType::bf16, kHeads, shape_.head_dim);
    layer.lse = NaturalLse(lse.data<float>());
    layer.save_kv = false;
    pass(indptr, lens, rows, layer);
    return unpack(indptr, to_host<uint16_t>(out, q.size()), to_host<float>(lse, lse_count));
  }

 private:
  void pass(const std::vector<int32_t>& indptr, const std::vector<int32_t>& lens,
            const std::vector<int32_t>& rows, const LayerTensors& layer) {
    const auto indptr_device = to_device(indptr), lens_device = to_device(lens);
    const auto rows_device = to_device(rows);
    BatchView batch;
    batch.mode = ForwardMode::extend;
    batch.requests = static_cast<int32_t>(lens.size());
    batch.tokens = indptr.back();
    batch.q_indptr = indptr_device.span<int32_t>();
    batch.kv_lens = lens_device.span<int32_t>();
    batch.request_rows = rows_device.span<int32_t>();
    batch.table.rows = static_cast<int32_t>(slots_.bytes() / (kMaxTokens * sizeof(int32_t)));
    batch.table.entries = slots_.data<int32_t>();
    batch.table.stride = kMaxTokens;
    batch.out_slots = out_slots_.span<int64_t>();
    backend_->plan(batch);
    backend_->forward(layer);
    gpu::synchronize(nullptr);
  }

  void store_keys() {
    std::vector<int32_t> indptr{0}, rows(requests_.size());
    std::iota(rows.begin(), rows.end(), 0);
    for (size_t i = 0; i < rows.size(); ++i) indptr.push_back(indptr.back() + kMaxTokens);
    const gpu::DeviceBuffer values = to_device(noise_);
    LayerTensors layer;
    layer.k = dense_rows(values.data(), DType::bf16, kKvHeads, shape_.head_dim);
    layer.v = dense_rows(values.data<uint16_t>() + values.bytes() / 4, DType::bf16, kKvHeads,
                         shape_.head_dim);
    pass(indptr, std::vector<int32_t>(rows.size(), kMaxTokens), rows, layer);
  }

  std::vector<Rows> unpack(const std::vector<int32_t>& indptr, const std::vector<uint16_t>& out,
                           const std::vector<float>& lse) const {
    std::vector<Rows> all;
    for (size_t i = 0; i + 1 < indptr.size(); ++i) {
      const auto begin = static_cast<size_t>(indptr[i]), end = static_cast<size_t>(indptr[i + 1]);
      Rows& rows = all.emplace_back();
      for (size_t n = begin * width_; n < end * width_; ++n)
        rows.out.push_back(bf16_to_float(out[n]));
      rows.lse.assign(lse.begin() + static_cast<int64_t>(begin * kHeads),
                      lse.begin() + static_cast<int64_t>(end * kHeads));
    }
    return all;
  }

  const Shape shape_;
  const Requests requests_;
  const size_t width_;  // query elements per token
  std::vector<uint16_t> noise_;
  std::unique_ptr<KvPool> pool_;
  std::unique_ptr<AttentionBackend> backend_;
  gpu::DeviceBuffer slots_, out_slots_;
};

struct EarlyCase {
  BackendEntry entry;
  Shape shape;
};
// Prints a case in failure messages.
void PrintTo(const EarlyCase& test, std::ostream* to) {
  *to << test.entry.name << ", " << test.shape.name;
}

std::vector<EarlyCase> cases() {
  std::vector<EarlyCase> all;
  for (const BackendEntry& entry : test::gpu_backends()) {
    if (!test::serves(entry, "mixed")) continue;  // MLA's kernels: mla_decode_test.cc
    for (const Shape& shape : std::vector<Shape>{{"page_64", 128, 64},
                                                 {"page_16", 64, 16},
                                                 {"page_1", 128, 1},
                                                 {"dim_256", 256, 64},
                                                 {"window", 128, 64, false, 20},
                                                 {"fp8", 128, 16, false, 0, DType::f8e4m3},
                                                 {"invariant_page_64", 128, 64, true},
                                                 {"invariant_page_16", 64, 16, true},
                                                 {"invariant_page_1", 128, 1, true},
                                                 {"invariant_dim_256", 256, 64, true},
                                                 {"invariant_window", 128, 64, true, 20}}) {
      all.push_back({entry, shape});
    }
  }
  return all;
}

class EarlyTokens : public ::testing::TestWithParam<EarlyCase> {};

// Tokens before the first key see none. The other tokens get the results that they get alone, and
// other requests of the batch do not matter.
TEST_P(EarlyTokens, SeeNoKey) {
  const Requests requests = {{64, 51}, {20, 1}, {4, 2},   {1, 0},     {64, 0},  {1, 40}, {90, 90},
                             {2, 1},   {3, 0},  {9, 300}, {320, 140}, {300, 7}, {200, 0}};
  const Shape& shape = GetParam().shape;
  const float most = shape.batch_invariant ? 0 : 0.02f;
  const auto expect_near = [&](std::span<const float> got, std::span<const float> want) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t n = 0; n < got.size(); ++n) {
      ASSERT_TRUE(test::is_near(got[n], want[n], most)) << "element " << n;
    }
  };
  EarlyRun run(GetParam().entry, shape, requests);
  const std::vector<Rows> together = run.attend(0, requests.size(), false);
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto [tokens, keys] = requests[i];
    SCOPED_TRACE(std::to_string(tokens) + " tokens, " + std::to_string(keys) + " keys");
    const Rows alone = run.attend(i, i + 1, false).front();
    const auto early = static_cast<size_t>(std::max(tokens - keys, 0));
    const Rows seeing = keys > 0 ? run.attend(i, i + 1, true).front() : Rows{};
    const size_t width = alone.out.size() / static_cast<size_t>(tokens);
    for (const Rows& rows : {alone, together[i]}) {
      const auto out = std::span(rows.out), lse = std::span(rows.lse);
      EXPECT_TRUE(std::ranges::all_of(out.first(early * width), [](float x) { return x == 0; }));
      EXPECT_TRUE(
          std::ranges::all_of(lse.first(early * kHeads), [](float x) { return x == kNone; }));
      expect_near(out.subspan(early * width), seeing.out);
      expect_near(lse.subspan(early * kHeads), seeing.lse);
    }
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(EarlyTokens);
INSTANTIATE_TEST_SUITE_P(Builtin, EarlyTokens, ::testing::ValuesIn(cases()), [](const auto& param) {
  return param.param.entry.name + "_" + param.param.shape.name;
});

}  // namespace
}  // namespace fovea
