// SPDX-License-Identifier: Apache-2.0
// Weights that are generated from a seed: any piece of a tensor is the same however it is read,
// values have the deviation of an initialization, and the config alone determines a model's size.
#include "model/random_weights.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>

#include "core/float_types.h"
#include "model/weights.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

constexpr std::array<int64_t, 2> kMatrix = {3000, 256};
constexpr int64_t kElements = kMatrix[0] * kMatrix[1];

class RandomWeightsTest : public testing::Test {
 protected:
  static JsonObject config(const std::string& text) {
    return JsonObject::parse(text, "config.json");
  }

  Checkpoint checkpoint(uint64_t seed, const std::string& text = "{}") {
    return Checkpoint::random("", config(text), seed, threads_);
  }
  static std::vector<std::byte> bytes_of(const StoredTensor& tensor) {
    std::vector<std::byte> bytes(tensor.bytes);
    tensor.read(0, bytes);
    return bytes;
  }
  static std::vector<float> values_of(const StoredTensor& tensor) {
    const std::vector<std::byte> bytes = bytes_of(tensor);
    std::vector<float> values(bytes.size() / dtype_bytes(tensor.dtype));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = load_float(bytes.data(), tensor.dtype, static_cast<int64_t>(i));
    }
    return values;
  }

  ThreadPool threads_{2};
};

TEST_F(RandomWeightsTest, APieceEqualsThatPartOfTheWhole) {
  for (const char* dtype : {"bfloat16", "float16", "float32"}) {
    const Checkpoint made = checkpoint(7, std::string(R"({"dtype": ")") + dtype + "\"}");
    const StoredTensor& tensor = made.tensor("a.weight", kMatrix);
    const std::vector<std::byte> whole = bytes_of(tensor);
    const size_t element = dtype_bytes(tensor.dtype);
    ASSERT_EQ(whole.size(), static_cast<size_t>(kElements) * element);
    for (const auto& [first, count] :
         {std::pair{0, 1}, {1, 2}, {3, 6}, {5, 300'001}, {767'999, 1}}) {
      std::vector<std::byte> piece(static_cast<size_t>(count) * element);
      tensor.read(static_cast<size_t>(first) * element, piece);
      EXPECT_EQ(std::memcmp(piece.data(), whole.data() + static_cast<size_t>(first) * element,
                            piece.size()),
                0)
          << dtype << " from " << first;
    }
    std::array<std::byte, 3> odd{};
    test::expect_invalid("inside an element", [&] { tensor.read(0, odd); });
    std::vector<std::byte> beyond(whole.size() + element);
    test::expect_invalid("are read of a tensor of", [&] { tensor.read(0, beyond); });
  }
}

TEST_F(RandomWeightsTest, SeedAndNameMakeTheBits) {
  const auto bytes = [&](uint64_t seed, const char* name) {
    return bytes_of(checkpoint(seed).tensor(name, kMatrix));
  };
  const std::vector<std::byte> first = bytes(7, "a.weight");
  EXPECT_EQ(first, bytes(7, "a.weight"));
  EXPECT_NE(first, bytes(8, "a.weight"));
  EXPECT_NE(first, bytes(7, "b.weight"));
  // A different number of threads.
  ThreadPool one(1);
  EXPECT_EQ(first,
            bytes_of(Checkpoint::random("", config("{}"), 7, one).tensor("a.weight", kMatrix)));
}

TEST_F(RandomWeightsTest, DtypesAreRoundingsOfTheSameValues) {
  const Checkpoint narrow = checkpoint(7), wide = checkpoint(7, R"({"torch_dtype": "float32"})");
  EXPECT_EQ(narrow.tensor("a.weight", kMatrix).dtype, DType::bf16);  // the default
  const std::vector<float> bf16 = values_of(narrow.tensor("a.weight", kMatrix));
  const std::vector<float> f32 = values_of(wide.tensor("a.weight", kMatrix));
  for (size_t i = 0; i < f32.size(); i += 97) {
    ASSERT_EQ(bf16[i], bf16_to_float(float_to_bf16(f32[i]))) << i;
  }
}

TEST_F(RandomWeightsTest, MeanAndDeviationAreThoseOfAnInitialisation) {
  struct Case {
    const char* name;
    std::vector<int64_t> shape;
    InitialValues values;
    double mean, deviation;
  };
  const Case cases[] = {
      {"matrix", {3000, 256}, {}, 0, 1 / 16.0},
      {"bias", {100'000}, {}, 0, 0.02},
      {"stack", {4, 100, 400}, InitialValues::of_fan_in(100), 0, 0.1},
      {"shifted", {100'000}, {.mean = 3, .deviation = 0.5f}, 3, 0.5},
      {"norm", {1000}, InitialValues::constant(1), 1, 0},
  };
  const Checkpoint made = checkpoint(11, R"({"dtype": "float32"})");
  for (const Case& one : cases) {
    SCOPED_TRACE(one.name);
    const std::vector<float> values = values_of(made.tensor(one.name, one.shape, one.values));
    double sum = 0, squares = 0, largest = 0;
    for (const float value : values) sum += value;
    const double mean = sum / static_cast<double>(values.size());
    for (const float value : values) {
      squares += (value - mean) * (value - mean);
      largest = std::max(largest, std::fabs(value - one.mean));
    }
    const double deviation = std::sqrt(squares / static_cast<double>(values.size()));
    EXPECT_NEAR(mean, one.mean, 5 * one.deviation / std::sqrt(values.size()) + 1e-9);
    EXPECT_NEAR(deviation, one.deviation, 0.02 * one.deviation);
    EXPECT_LE(largest, one.deviation * std::sqrt(3.0) * (1 + 1e-5));
  }
}

TEST_F(RandomWeightsTest, RefusesDtypesAndShapesThatNoWeightHas) {
  test::expect_error(ErrorCode::unsupported, "dtype is 'float64'",
                     [&] { checkpoint(1, R"({"torch_dtype": "float64"})"); });
  const Checkpoint made = checkpoint(1);
  (void)made.tensor("a.weight", kMatrix);
  constexpr std::array<int64_t, 2> kOther = {256, 3000};
  test::expect_error(ErrorCode::invalid_argument, {"'a.weight'", "[3000, 256]", "[256, 3000]"},
                     [&] { (void)made.tensor("a.weight", kOther); });
  constexpr std::array<int64_t, 3> kHuge = {1 << 30, 1 << 30, 1 << 30};
  test::expect_error(ErrorCode::unsupported, "2^64 bytes",
                     [&] { (void)made.tensor("huge.weight", kHuge); });
  EXPECT_EQ(made.find("lm_head.weight"), nullptr);
}

}  // namespace
}  // namespace fovea
