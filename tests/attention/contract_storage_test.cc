// SPDX-License-Identifier: Apache-2.0
// Addresses and scales: caches beyond 2^31 elements, slots that do not exist, linear scales.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "core/float_types.h"
#include "support/cases.h"
#include "support/error_budget.h"
#include "support/expect_error.h"
#include "support/oracle.h"
#include "support/run_backend.h"
#include "support/test_device.h"

namespace fovea {
namespace {

using test::AttentionCase;
using test::CaseData;
using test::Fill;
using test::Output;

class Storage : public ::testing::TestWithParam<std::string> {
 protected:
  // Null: the backend does not serve the case.
  const BackendEntry* serving(const AttentionCase& test) const {
    const BackendEntry* entry = registry_.find(GetParam());
    return entry->reject(test::request_of(test)).empty() ? entry : nullptr;
  }

 private:
  const BackendRegistry registry_ = BackendRegistry::builtin();
};

TEST_P(Storage, HugePageStrideChangesNoBit) {
  if (test::on_gpu()) GTEST_SKIP() << "gigabytes between pages cannot be copied to a GPU";
  int served = 0;
  AttentionCase latent = test::mla_case("huge_page_stride_mla", 4);
  latent.page_stride = (int64_t{1} << 31) / 7;
  for (AttentionCase test : {test::attention_case("huge_page_stride"), latent}) {
    const BackendEntry* entry = serving(test);
    if (entry == nullptr) continue;
    ++served;
    const CaseData data = make_data(test);
    const Output huge = run_case(*entry, test, data);
    test.page_stride = 0;
    EXPECT_TRUE(same_bits(huge, run_case(*entry, test, data))) << test.name;
  }
  EXPECT_EQ(served, 2);
}

// An entry in use that names no slot of the pool is refused before anything is read.
TEST_P(Storage, SlotsThatDoNotExistAreErrors) {
  if (test::on_gpu()) GTEST_SKIP() << "the host does not see a GPU's tables";
  const AttentionCase test = test::attention_case("mixed");
  const BackendEntry* entry = serving(test);
  ASSERT_NE(entry, nullptr);
  const CaseData data = make_data(test);
  ThreadPool threads(1);
  test::PagedStore store(test, data, Fill::poison);
  test::BackendUnderTest under_test(*entry, test, &store, threads, Fill::poison);
  test::PackedBatch batch(test, data, &store, whole_case(test), Fill::poison);
  const auto rows = static_cast<int64_t>(test.requests.size()) + 2;
  const int64_t slots = store.pool().pages() * test.cache.page_size;
  for (int64_t wild : {int64_t{-1}, int64_t{std::numeric_limits<int32_t>::min()}, slots,
                       int64_t{std::numeric_limits<int32_t>::max()}}) {
    std::vector<int32_t> table(store.table(), store.table() + rows * store.table_stride());
    // The first token of a page of the first request, whose tokens are all visible.
    table[static_cast<size_t>(store.row(0) * store.table_stride() + 16)] =
        static_cast<int32_t>(wild);
    BatchView view = batch.view();
    view.table.entries = table.data();
    const auto expect_refusal = [&] {
      test::expect_invalid(std::to_string(wild), [&] { under_test.backend().plan(view); });
    };
    expect_refusal();
    std::vector<int32_t> pages(store.page_table(),
                               store.page_table() + rows * store.page_table_stride());
    pages[static_cast<size_t>(store.row(0) * store.page_table_stride() + 1)] =
        static_cast<int32_t>(wild);
    view.table.entries = pages.data();
    view.table.stride = store.page_table_stride();
    view.table.entry_tokens = test.cache.page_size;
    expect_refusal();
  }
  // The backend still works.
  under_test.run(batch);
  EXPECT_TRUE(same_bits(batch.output(), run_case(*entry, test, data)));
}

// A decode batch padded to a fixed size: the padding uses row 0 of the table, stores non-finite
// values to page 0, and does not change other results.
void expect_padding_unseen(const BackendEntry& entry, const AttentionCase& test) {
  CaseData data = make_data(test);
  ThreadPool threads(2);
  const auto run = [&](int32_t padding) {
    AttentionCase padded = test;
    padded.padding = padding;
    padded.requests.resize(2 + static_cast<size_t>(padding));
    CaseData used = data;
    used.requests.resize(padded.requests.size());
    test::PagedStore store(padded, used, Fill::poison);
    test::BackendUnderTest under_test(entry, padded, &store, threads);
    test::PackedBatch batch(padded, used, &store, whole_case(padded), Fill::poison);
    under_test.run(batch);
    const KvLayerView view = store.pool().layer(test::PagedStore::kLayer);
    for (int32_t head = 0; head < test.spec.kv_heads; ++head) {
      for (int64_t d = 0; d < test.spec.head_dim; ++d) {
        EXPECT_TRUE(std::isfinite(load_float(k_address(view, 0, head), DType::f16, d)));
      }
      for (int64_t d = 0; d < test.spec.head_dim_v; ++d) {
        EXPECT_TRUE(std::isfinite(load_float(v_address(view, 0, head), DType::f16, d)));
      }
    }
    return batch.output();
  };
  std::fill(data.requests[2].k.begin(), data.requests[2].k.end(), NAN);
  std::fill(data.requests[2].v.begin(), data.requests[2].v.end(), INFINITY);
  const Output alone = run(0);
  Output padded = run(2);
  const size_t row = padded.out.size() / 4;
  EXPECT_EQ(std::vector<float>(padded.out.end() - row, padded.out.end()),
            std::vector<float>(row, 0));
  padded.out.resize(alone.out.size());
  padded.lse.resize(alone.lse.size());
  EXPECT_TRUE(same_bits(alone, padded));
}

TEST_P(Storage, PaddingTouchesPageZeroOnly) {
  int served = 0;
  for (AttentionCase test : {test::mha_case("padding", 4, 2, 64), test::mla_case("padding", 4)}) {
    test.cache.dtype = DType::f16;
    if (test::on_gpu()) test.spec.q_dtype = DType::f16;
    test.requests = {{1, 40}, {1, 17}, {1, 1}, {1, 0}};
    const BackendEntry* entry = serving(test);
    if (entry == nullptr) continue;
    ++served;
    expect_padding_unseen(*entry, test);
  }
  EXPECT_GT(served, 0);
}

// The result is linear in v_scale, and k_scale acts like the softmax scale.
TEST_P(Storage, ScalesActAsFactors) {
  AttentionCase test = test::attention_case("q_fp32_kv_fp8_e4m3_per_tensor");
  test.prewritten = true;
  const BackendEntry* entry = serving(test);
  if (entry == nullptr) GTEST_SKIP() << "takes no fp8 cache";
  const CaseData data = make_data(test);
  const auto run = [&](float k_factor, float v_factor) {
    ThreadPool threads(1);
    test::PagedStore store(test, data, Fill::poison);
    const KvLayerView view = store.pool().layer(test::PagedStore::kLayer);
    view.k_scale[0] *= k_factor;
    view.v_scale[0] *= v_factor;
    test::BackendUnderTest under_test(*entry, test, &store, threads);
    test::PackedBatch batch(test, data, &store, whole_case(test), Fill::poison);
    under_test.run(batch);
    return batch.output();
  };
  const Output once = run(1, 1);
  const Output four_times = run(1, 4);
  for (size_t i = 0; i < once.out.size(); ++i) EXPECT_EQ(four_times.out[i], 4 * once.out[i]);
  EXPECT_EQ(four_times.lse, once.lse);

  const Output sharper = run(4, 1);
  test.spec.scores.softmax_scale = static_cast<float>(4 * test::softmax_scale(test.spec));
  EXPECT_TRUE(same_bits(sharper, run(1, 1)));
}

// The only scale of latents acts like both.
TEST_P(Storage, ScaleOfLatentsActsAsFactor) {
  AttentionCase test = test::attention_case("mla_fp8_per_tensor");
  test.prewritten = true;
  const BackendEntry* entry = serving(test);
  if (entry == nullptr) GTEST_SKIP() << "takes no fp8 latents";
  const CaseData data = make_data(test);
  const auto run = [&](float factor) {
    ThreadPool threads(1);
    test::PagedStore store(test, data, Fill::poison);
    store.pool().layer(test::PagedStore::kLayer).k_scale[0] *= factor;
    test::BackendUnderTest under_test(*entry, test, &store, threads);
    test::PackedBatch batch(test, data, &store, whole_case(test), Fill::poison);
    under_test.run(batch);
    return batch.output();
  };
  const Output scaled = run(4);
  test.spec.scores.softmax_scale *= 4;
  const Output sharper = run(1);
  for (size_t i = 0; i < scaled.out.size(); ++i) EXPECT_EQ(scaled.out[i], 4 * sharper.out[i]);
  EXPECT_EQ(scaled.lse, sharper.lse);
}

TEST_P(Storage, ScaledE4m3CostsLittle) {
  for (const char* scale : {"per_tensor", "per_head", "per_token_head"}) {
    const AttentionCase test = test::attention_case(std::string("q_fp32_kv_fp8_e4m3_") + scale);
    const BackendEntry* entry = serving(test);
    if (entry == nullptr) GTEST_SKIP() << "takes no fp8 cache";
    const CaseData data = make_data(test);
    AttentionCase unquantised = test;
    unquantised.cache.dtype = DType::f32;
    unquantised.cache.scale = KvScale::none;
    const Output got = run_case(*entry, test, data);
    double error = 0, magnitude = 0;
    size_t at = 0;
    for (size_t request = 0; request < data.requests.size(); ++request) {
      for (double want : oracle(unquantised, data, request).exact.out) {
        const double difference = static_cast<double>(got.out[at++]) - want;
        error += difference * difference;
        magnitude += want * want;
      }
    }
    EXPECT_EQ(at, got.out.size());
    EXPECT_LT(std::sqrt(error / magnitude), test::kE4m3RelativeRms) << scale;
    EXPECT_GT(error, 0) << scale << " stored nothing as fp8";
  }
}

std::vector<std::string> built_backends() {
  std::vector<std::string> names;
  if (!test::why_no_test_device().empty()) return names;
  const BackendRegistry registry = BackendRegistry::builtin();
  for (const BackendEntry& entry : registry.entries()) {
    for (const char* name : {"mixed", "mla_page_16"}) {
      if (!entry.reject(test::request_of(test::attention_case(name))).empty()) continue;
      names.push_back(entry.name);
      break;
    }
  }
  return names;
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Storage);
INSTANTIATE_TEST_SUITE_P(Builtin, Storage, ::testing::ValuesIn(built_backends()),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace fovea
