// SPDX-License-Identifier: Apache-2.0
// Parts of matrices that are read by their addresses, from files and from generated values.
#include "model/located_tensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <vector>

#include "model/shard.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

constexpr int32_t kN = 12, kK = 8;

// Element [i, j] of the stored matrix is 100 i + j, in f32.
class Located : public testing::TestWithParam<bool> {
 protected:
  Located() {
    for (int i = 0; i < kN; ++i) {
      for (int j = 0; j < kK; ++j) values_.push_back(static_cast<float>(100 * i + j));
    }
    tensor_.dtype = DType::f32;
    tensor_.shape = {kN, kK};
    tensor_.bytes = values_.size() * sizeof(float);
    if (GetParam()) {
      tensor_.make = [this](size_t begin, std::span<std::byte> out) {
        std::memcpy(out.data(), reinterpret_cast<const std::byte*>(values_.data()) + begin,
                    out.size());
      };
    } else {
      tensor_.data = reinterpret_cast<const std::byte*>(values_.data());
    }
  }

  Linear whole(bool is_kn) {
    Linear linear;
    linear.weight = located_.locate(tensor_);
    linear.n = is_kn ? kK : kN;
    linear.k = is_kn ? kN : kK;
    linear.stride = kK;
    linear.is_kn = is_kn;
    return linear;
  }
  std::vector<float> read(const Linear& part, int64_t first, int64_t rows) {
    std::vector<float> out(static_cast<size_t>(rows) * LocatedTensors::row_bytes(part) /
                           sizeof(float));
    located_.read_rows(part, first, std::as_writable_bytes(std::span(out)));
    return out;
  }

  std::vector<float> values_;
  StoredTensor tensor_;
  LocatedTensors located_;
};

TEST_P(Located, PartsAreThoseOfTheMatrix) {
  ThreadPool threads(1);
  RankOf rank(*make_host_device(threads));
  rank.size = 3;
  rank.rank = 1;
  const Linear outputs = outputs_of(whole(false), {4, 4});
  EXPECT_EQ(LocatedTensors::rows_of(outputs), 4);
  const std::vector<float> rows = read(outputs, 1, 2);
  for (int i = 0; i < 16; ++i) EXPECT_EQ(rows[static_cast<size_t>(i)], 100 * (5 + i / 8) + i % 8);

  const std::vector<float> inputs = read(inputs_of(whole(false), {3, 2}, rank), 0, 12);
  for (int i = 0; i < 24; ++i) {
    EXPECT_EQ(inputs[static_cast<size_t>(i)], 100 * (i / 2) + 3 + i % 2);
  }

  const std::vector<float> columns = read(outputs_of(whole(true), {5, 3}), 0, 12);
  for (int i = 0; i < 36; ++i) {
    EXPECT_EQ(columns[static_cast<size_t>(i)], 100 * (i / 3) + 5 + i % 3);
  }
}

TEST_P(Located, EqualTensorsHaveOneAddress) {
  EXPECT_EQ(located_.locate(tensor_), located_.locate(tensor_));
}

TEST_P(Located, PartsOutsideAreNamed) {
  Linear part = whole(false);
  part.n = kN + 1;
  test::expect_invalid("ends outside its tensor", [&] { read(part, 0, 1); });
  part = whole(false);
  part.weight = nullptr;
  test::expect_invalid("is in no located tensor", [&] { read(part, 0, 1); });
}

INSTANTIATE_TEST_SUITE_P(FromFiles, Located, testing::Values(false));
INSTANTIATE_TEST_SUITE_P(Generated, Located, testing::Values(true));

}  // namespace
}  // namespace fovea
