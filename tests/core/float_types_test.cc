// SPDX-License-Identifier: Apache-2.0
#include "core/float_types.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace fovea {
namespace {

// Returns the finite values of all codes, sorted.
template <typename ToFloat>
std::vector<std::pair<float, int>> finite_codes(int count, ToFloat to_float) {
  std::vector<std::pair<float, int>> values;
  for (int code = 0; code < count; ++code) {
    const float value = to_float(code);
    if (std::isfinite(value)) values.emplace_back(value, code);
  }
  std::sort(values.begin(), values.end());
  return values;
}

// Rounding must give the nearest code, and the even one at the midpoint of two.
template <typename ToFloat, typename FromFloat>
void expect_nearest_even(int count, ToFloat to_float, FromFloat from_float) {
  const auto codes = finite_codes(count, to_float);
  for (size_t i = 0; i + 1 < codes.size(); ++i) {
    const float low = codes[i].first;
    const float high = codes[i + 1].first;
    if (low == high) continue;  // the two zeros
    const float middle = static_cast<float>((static_cast<double>(low) + high) / 2);
    EXPECT_EQ(to_float(from_float(low)), low);
    EXPECT_EQ(to_float(from_float(std::nextafter(middle, low))), low) << middle;
    EXPECT_EQ(to_float(from_float(std::nextafter(middle, high))), high) << middle;
    const float tie = to_float(from_float(middle));
    const bool low_is_even = codes[i].second % 2 == 0;
    EXPECT_EQ(tie, low_is_even ? low : high) << "between " << low << " and " << high;
  }
}

TEST(FloatTypes, E4m3RoundsToNearestEven) {
  expect_nearest_even(
      256, [](int code) { return f8e4m3_to_float(static_cast<uint8_t>(code)); },
      [](float value) { return static_cast<int>(float_to_f8e4m3(value)); });
}

TEST(FloatTypes, E5m2RoundsToNearestEven) {
  expect_nearest_even(
      256, [](int code) { return f8e5m2_to_float(static_cast<uint8_t>(code)); },
      [](float value) { return static_cast<int>(float_to_f8e5m2(value)); });
}

TEST(FloatTypes, F16RoundsToNearestEven) {
  expect_nearest_even(
      65536, [](int code) { return f16_to_float(static_cast<uint16_t>(code)); },
      [](float value) { return static_cast<int>(float_to_f16(value)); });
}

TEST(FloatTypes, Bf16RoundsToNearestEven) {
  expect_nearest_even(
      65536, [](int code) { return bf16_to_float(static_cast<uint16_t>(code)); },
      [](float value) { return static_cast<int>(float_to_bf16(value)); });
}

TEST(FloatTypes, KnownCodes) {
  EXPECT_EQ(float_to_f8e4m3(1.0f), 0x38);
  EXPECT_EQ(float_to_f8e4m3(448.0f), 0x7e);
  EXPECT_EQ(float_to_f8e4m3(0x1p-9f), 0x01);  // smallest subnormal
  EXPECT_EQ(float_to_f8e5m2(1.0f), 0x3c);
  EXPECT_EQ(float_to_f8e5m2(57344.0f), 0x7b);
  EXPECT_EQ(float_to_f16(65504.0f), 0x7bff);
  EXPECT_EQ(float_to_bf16(1.0f), 0x3f80);
}

TEST(FloatTypes, Fp8SaturatesAndKeepsNan) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float huge : {449.0f, 1e30f, kInfinity}) {
    EXPECT_EQ(f8e4m3_to_float(float_to_f8e4m3(huge)), 448.0f);
    EXPECT_EQ(f8e4m3_to_float(float_to_f8e4m3(-huge)), -448.0f);
  }
  EXPECT_EQ(f8e5m2_to_float(float_to_f8e5m2(kInfinity)), 57344.0f);
  EXPECT_TRUE(std::isnan(f8e4m3_to_float(float_to_f8e4m3(NAN))));
  EXPECT_TRUE(std::isnan(f8e5m2_to_float(float_to_f8e5m2(NAN))));
  EXPECT_TRUE(std::isnan(f16_to_float(float_to_f16(NAN))));
  EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(NAN))));
}

TEST(FloatTypes, InfinitiesOfTheWideTypes) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(f16_to_float(float_to_f16(65520.0f)), kInfinity);
  EXPECT_EQ(f16_to_float(float_to_f16(-kInfinity)), -kInfinity);
  EXPECT_EQ(bf16_to_float(float_to_bf16(std::numeric_limits<float>::max())), kInfinity);
}

TEST(DType, NamesAreReadBack) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f8e4m3, DType::f8e5m2,
                            DType::i32, DType::i64, DType::u8}) {
    EXPECT_EQ(parse_dtype(dtype_name(dtype)), dtype);
  }
  EXPECT_EQ(parse_dtype("float12"), std::nullopt);
}

}  // namespace
}  // namespace fovea
