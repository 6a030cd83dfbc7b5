// SPDX-License-Identifier: Apache-2.0
// Requests move between pools with other pages, and nothing else is written.
#include "fovea/convert_pages.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "core/float_types.h"
#include "kvcache/converted_pools.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using test::ConvertCase;
using test::expect_error;
using test::expect_invalid;
using test::ValueCase;

class ConvertPages : public testing::TestWithParam<ConvertCase> {};

TEST_P(ConvertPages, KeepsEveryRowOfTheRequest) {
  for (const int64_t tokens : {0, 1, 16, 61}) {
    const test::ConvertedPools pools(GetParam());
    make_page_converter(pools.from(), pools.to())
        ->convert(pools.from_pages(), pools.to_pages(), tokens);
    pools.expect_moved(tokens);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, ConvertPages, testing::ValuesIn(test::convert_cases()),
                         test::name_of_case);

class ConvertValues : public testing::TestWithParam<ValueCase> {};

TEST_P(ConvertValues, RoundsEveryValueOnce) {
  for (const int64_t tokens : {0, 1, 300}) {
    const test::ValuePools pools(GetParam());
    make_page_converter(pools.from(), pools.to())
        ->convert(pools.from_pages(), pools.to_pages(), tokens);
    pools.expect_rounded(tokens);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, ConvertValues, testing::ValuesIn(test::value_cases()),
                         test::name_of_values);

TEST(ConvertValuesOfPageZero, StayFinite) {
  const KvCacheSpec spec{
      .layers = 1, .kv_heads = 1, .head_dim = 4, .head_dim_v = 4, .page_size = 1};
  KvCacheSpec narrow = spec;
  narrow.dtype = DType::f16;
  const auto from = make_kv_pool(spec, 4), to = make_kv_pool(narrow, 4);
  const KvLayerView view = from->layer(0);
  const std::vector<float> row = {std::nanf(""), INFINITY, -INFINITY, 1};
  for (char* const side : {k_address(view, 1, 0), v_address(view, 1, 0)}) {
    std::memcpy(side, row.data(), sizeof(float) * row.size());
  }
  const std::vector<int64_t> one = {1}, zero = {0};
  const auto converter = make_page_converter(*from, *to);
  converter->convert(one, zero, 1);
  converter->convert(one, one, 1);
  const KvLayerView got = to->layer(0);
  const std::vector<float> finite = {0, 65504, -65504, 1};
  for (size_t i = 0; i < row.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    EXPECT_EQ(load_float(k_address(got, 0, 0), DType::f16, at), finite[i]) << i;
    EXPECT_EQ(load_float(v_address(got, 0, 0), DType::f16, at), finite[i]) << i;
    const float kept = load_float(k_address(got, 1, 0), DType::f16, at);
    EXPECT_TRUE(std::isnan(row[i]) ? std::isnan(kept) : kept == row[i]) << i;
  }
}

TEST(ConvertPagesErrors, NameTheArgument) {
  const KvCacheSpec spec{
      .layers = 1, .kv_heads = 2, .head_dim = 8, .head_dim_v = 8, .page_size = 4};
  const auto pool = make_kv_pool(spec, 4);
  const auto refuse = [&](std::string_view part, auto change) {
    KvCacheSpec other = spec;
    change(other);
    expect_invalid(part, [&] { (void)make_page_converter(*pool, *make_kv_pool(other, 4)); });
  };
  refuse("layers is 1 in `from` and 2 in `to`", [](auto& s) { s.layers = 2; });
  refuse("kv_heads is 2", [](auto& s) { s.kv_heads = 1; });
  refuse("head_dim is 8", [](auto& s) { s.head_dim = 16; });
  refuse("head_dim_v is 8", [](auto& s) { s.head_dim_v = 16; });
  refuse("layout: one pool has keys and values, the other latents", [](auto& s) {
    s.layout = KvLayout::mla;
    s.kv_heads = 1;
  });
  KvCacheSpec scaled = spec;
  scaled.dtype = DType::f8e4m3;
  scaled.scale = KvScale::per_head;
  const auto fixed = make_kv_pool(scaled, 4);
  expect_error(ErrorCode::unsupported, "scale: the caller sets scales once",
               [&] { (void)make_page_converter(*fixed, *fixed); });
  expect_error(ErrorCode::unsupported, "scale: the caller sets scales once",
               [&] { (void)make_page_converter(*pool, *fixed); });
  const auto converter = make_page_converter(*pool, *pool);
  const std::vector<int64_t> one = {1}, wrong = {4};
  expect_invalid("tokens is -1", [&] { converter->convert(one, one, -1); });
  expect_invalid("from_pages holds 1 pages of 4, too few for 5 tokens",
                 [&] { converter->convert(one, one, 5); });
  expect_invalid("to_pages holds page 4, the pool has 4",
                 [&] { converter->convert(one, wrong, 4); });
}

}  // namespace
}  // namespace fovea
