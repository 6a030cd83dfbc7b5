// SPDX-License-Identifier: Apache-2.0
// Requests move between pools of a GPU as between those of the CPU. Skipped without a GPU.
#include "fovea/convert_pages.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "fovea/gpu.h"
#include "gpu/gpu.h"
#include "kvcache/converted_pools.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

constexpr Device kGpu{DeviceKind::cuda, 0};

// Copies token by token, because the layout of the memory behind a pool is its own.
void copy_pool(const KvPool& from, const KvPool& to) {
  const bool up = to.device() == kGpu;
  for (int64_t slot = 0; slot < from.pages() * from.spec().page_size; ++slot) {
    std::vector<char*> targets;
    test::PoolBytes::for_rows(to, slot, [&](char* row, size_t) { targets.push_back(row); });
    auto target = targets.begin();
    test::PoolBytes::for_rows(from, slot, [&](char* row, size_t bytes) {
      if (up) {
        gpu::copy_to_device(*target++, row, bytes, nullptr);
      } else {
        gpu::copy_to_host(*target++, row, bytes, nullptr);
      }
    });
  }
  gpu::synchronize(nullptr);
}

class GpuConvertPages : public testing::TestWithParam<test::ConvertCase> {
 protected:
  void SetUp() override {
    if (gpu_devices().empty()) GTEST_SKIP() << why_no_gpu();
  }
};

TEST_P(GpuConvertPages, KeepsEveryRowOfTheRequest) {
  const gpu::Context context(0);
  for (const int64_t tokens : {1, 61}) {
    const test::ConvertedPools pools(GetParam());
    const auto from = make_kv_pool(pools.from().spec(), pools.from().pages(), kGpu);
    const auto to = make_kv_pool(pools.to().spec(), pools.to().pages(), kGpu);
    copy_pool(pools.from(), *from);
    make_page_converter(*from, *to)->convert(pools.from_pages(), pools.to_pages(), tokens);
    copy_pool(*to, pools.to());
    pools.expect_moved(tokens);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuConvertPages, testing::ValuesIn(test::convert_cases()),
                         test::name_of_case);

class GpuConvertValues : public testing::TestWithParam<test::ValueCase> {
 protected:
  void SetUp() override {
    if (gpu_devices().empty()) GTEST_SKIP() << why_no_gpu();
  }
};

TEST_P(GpuConvertValues, HaveTheBitsOfTheCpu) {
  constexpr int64_t kTokens = 61;
  const gpu::Context context(0);
  const test::ValuePools host(GetParam());
  const KvCacheSpec &from_spec = host.from().spec(), &to_spec = host.to().spec();
  const auto from = make_kv_pool(from_spec, host.from().pages(), kGpu);
  const auto to = make_kv_pool(to_spec, host.to().pages(), kGpu);
  copy_pool(host.from(), *from);
  if (!GetParam().on_gpus) {
    test::expect_error(ErrorCode::unsupported, "layout: a GPU does not convert rows of 656 bytes",
                       [&] { (void)make_page_converter(*from, *to); });
    return;
  }
  make_page_converter(*from, *to)->convert(host.from_pages(), host.to_pages(), kTokens);
  make_page_converter(host.from(), host.to())->convert(host.from_pages(), host.to_pages(), kTokens);
  const auto got = make_kv_pool(to_spec, to->pages());
  copy_pool(*to, *got);
  for (int64_t slot = 0; slot < to->pages() * to_spec.page_size; ++slot) {
    ASSERT_EQ(test::PoolBytes::of_token(*got, slot), test::PoolBytes::of_token(host.to(), slot))
        << "slot " << slot;
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuConvertValues, testing::ValuesIn(test::value_cases()),
                         test::name_of_values);

// More pages than one launch lists.
TEST(GpuConvertLongRequest, TakesSeveralLaunches) {
  if (gpu_devices().empty()) GTEST_SKIP() << why_no_gpu();
  const gpu::Context context(0);
  const KvCacheSpec spec{.dtype = DType::bf16,
                         .layers = 1,
                         .kv_heads = 1,
                         .head_dim = 8,
                         .head_dim_v = 8,
                         .page_size = 1};
  constexpr int64_t kTokens = 600;
  const auto host = make_kv_pool(spec, kTokens + 1);
  for (int64_t slot = 0; slot <= kTokens; ++slot) {
    test::PoolBytes::for_rows(*host, slot, [&](char* row, size_t bytes) {
      for (size_t i = 0; i < bytes; ++i)
        row[i] = static_cast<char>(slot * 31 + static_cast<int64_t>(i));
    });
  }
  const auto from = make_kv_pool(spec, kTokens + 1, kGpu);
  copy_pool(*host, *from);
  KvCacheSpec wide = spec;
  wide.page_size = 3;
  const auto to = make_kv_pool(wide, kTokens / 3 + 1, kGpu);
  std::vector<int64_t> from_pages, to_pages;
  for (int64_t page = kTokens; page > 0; --page) from_pages.push_back(page);
  for (int64_t page = 1; page <= kTokens / 3; ++page) to_pages.push_back(page);
  make_page_converter(*from, *to)->convert(from_pages, to_pages, kTokens);
  const auto result = make_kv_pool(wide, kTokens / 3 + 1);
  copy_pool(*to, *result);
  for (int64_t token = 0; token < kTokens; ++token) {
    ASSERT_EQ(test::PoolBytes::of_token(*result, token + 3),
              test::PoolBytes::of_token(*host, kTokens - token));
  }
}

}  // namespace
}  // namespace fovea
