// SPDX-License-Identifier: Apache-2.0
// StateMerger on the CPU, and with FOVEA_TEST_DEVICE=cuda on a GPU: merging the states of parts of
// the keys gives the state of all keys.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/float_types.h"
#include "fovea/error.h"
#include "fovea/merge_states.h"
#include "support/device_array.h"
#include "support/expect_error.h"
#include "support/test_device.h"

namespace fovea {
namespace {

using test::expect_invalid;

constexpr int64_t kTokens = 37;
constexpr int32_t kHeads = 3, kDim = 70, kHeadStride = 80, kTokenStride = kHeads * kHeadStride + 16;
constexpr int32_t kKeys = 60, kRows = kTokens * kHeads;
constexpr int64_t kFar = std::numeric_limits<int64_t>::max();
constexpr float kEmpty = -std::numeric_limits<float>::infinity();

// A state in memory of the test device, strided, NaN between its rows.
class State {
 public:
  explicit State(DType dtype) : dtype_(dtype), out_(kTokens * kTokenStride * dtype_bytes(dtype)) {
    for (int64_t i = 0; i < kTokens * kTokenStride; ++i) set(i, NAN);
  }

  // Computes softmax over keys [begin, end); `keys` has a score and kDim values per row and key.
  void attend(const std::vector<double>& keys, int32_t begin, int32_t end) {
    for (int32_t row = 0; row < kRows && begin < end; ++row) {
      const auto key = [&](int32_t n) {
        return &keys[static_cast<size_t>((row * kKeys + n) * (kDim + 1))];
      };
      double most = *key(begin), total = 0;
      for (int32_t n = begin; n < end; ++n) most = std::max(most, *key(n));
      for (int32_t n = begin; n < end; ++n) total += std::exp(*key(n) - most);
      lse_[static_cast<size_t>(row)] = static_cast<float>(most + std::log(total));
      for (int32_t d = 0; d < kDim; ++d) {
        double sum = 0;
        for (int32_t n = begin; n < end; ++n) sum += std::exp(*key(n) - most) * key(n)[1 + d];
        set(place(row) + d, static_cast<float>(sum / total));
      }
    }
  }
  // Sets the state of rows that have seen no key, as forward() does.
  void clear() {
    for (int32_t row = 0; row < kRows; ++row) {
      for (int32_t d = 0; d < kDim; ++d) set(place(row) + d, 0);
    }
  }

  AttentionState view() {
    if (test::on_gpu()) {
      device_out_ = test::to_device(out_);
      device_lse_ = test::to_device(lse_);
      return {rows(device_out_->data()), NaturalLse(device_lse_->data<float>())};
    }
    return {rows(out_.data()), NaturalLse(lse_.data())};
  }
  // Copies the device's result to the host.
  void read() {
    if (!test::on_gpu()) return;
    out_ = test::to_host<char>(*device_out_, out_.size());
    lse_ = test::to_host<float>(*device_lse_, lse_.size());
  }

  float out(int32_t row, int32_t d) const {
    return load_float(out_.data(), dtype_, place(row) + d);
  }
  float lse(int32_t row) const { return lse_[static_cast<size_t>(row)]; }
  const std::vector<char>& bytes() const { return out_; }

 private:
  static int64_t place(int32_t row) {
    return row / kHeads * kTokenStride + row % kHeads * kHeadStride;
  }
  HeadRows rows(void* data) const { return {data, dtype_, kTokenStride, kHeadStride}; }
  void set(int64_t at, float value) { store_float(out_.data(), dtype_, at, value); }

  DType dtype_;
  std::vector<char> out_;
  std::vector<float> lse_ = std::vector<float>(kRows, kEmpty);
  std::optional<gpu::DeviceBuffer> device_out_, device_lse_;
};

// Moves a pointer by one byte.
template <typename T>
void step(T*& data) {
  data = reinterpret_cast<T*>(reinterpret_cast<char*>(data) + 1);
}
void step(void*& data) { data = static_cast<char*>(data) + 1; }

class StateMergers : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!test::why_no_test_device().empty()) GTEST_SKIP() << test::why_no_test_device();
    if (test::on_gpu()) context_.emplace(test::test_device().index);
    if (context_) context_->bind();
  }
  static std::vector<DType> dtypes() {
    std::vector<DType> list = {DType::bf16, DType::f16};
    if (!test::on_gpu()) list.push_back(DType::f32);
    return list;
  }
  std::unique_ptr<StateMerger> merger(const StateShape& shape) {
    return make_state_merger(shape, test::test_device().device(),
                             test::on_gpu() ? nullptr : &threads_);
  }

 private:
  std::optional<gpu::Context> context_;
  ThreadPool threads_{2};
};

std::vector<double> random_keys() {
  std::mt19937 random(3);
  std::uniform_real_distribution<double> uniform(-1, 1);
  std::vector<double> keys(static_cast<size_t>(kRows) * kKeys * (kDim + 1));
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[i] = (i % (kDim + 1) == 0 ? 10 : 1) * uniform(random);
  }
  return keys;
}

TEST_F(StateMergers, PartsAddUpToTheWhole) {
  const std::vector<double> keys = random_keys();
  const std::vector<int32_t> cuts = {0, 1, 9, 9, 30, kKeys};  // the third part has no key
  for (const DType dtype : dtypes()) {
    SCOPED_TRACE(dtype_name(dtype));
    const auto merge = merger({dtype, kHeads, kDim});
    State whole(dtype), sum(dtype);
    whole.attend(keys, 0, kKeys);
    sum.clear();
    AttentionState into = sum.view();
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      State part(dtype);
      part.attend(keys, cuts[i], cuts[i + 1]);
      merge->merge(into, part.view(), kTokens);
      if (test::on_gpu()) gpu::synchronize(nullptr);  // before the part's memory is freed
    }
    sum.read();
    // Values of at most 1 are rounded once as a part and once in every sum; weights are at most 1.
    const double step = dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0x1p-22;
    for (int32_t row = 0; row < kRows; ++row) {
      ASSERT_NEAR(sum.lse(row), whole.lse(row), 0x1p-19) << row;
      for (int32_t d = 0; d < kDim; ++d) {
        ASSERT_NEAR(sum.out(row, d), whole.out(row, d), step * 3) << row << ", " << d;
      }
    }
  }
}

TEST_F(StateMergers, EmptyPartsAndGapsChangeNoByte) {
  const std::vector<double> keys = random_keys();
  for (const DType dtype : dtypes()) {
    SCOPED_TRACE(dtype_name(dtype));
    const auto merge = merger({dtype, kHeads, kDim});
    State sum(dtype), empty(dtype);  // all of empty's out is NaN
    sum.attend(keys, 0, 20);
    const std::vector<char> before = sum.bytes();
    const AttentionState into = sum.view(), nothing = empty.view();
    merge->merge(into, nothing, kTokens);
    merge->merge(into, nothing, 0);
    merge->merge({}, {}, 0);  // as a rank without requests has them
    sum.read();
    EXPECT_EQ(sum.bytes(), before);
  }
}

TEST_F(StateMergers, ReplaysMerge) {
  if (!test::on_gpu()) GTEST_SKIP() << "graphs are a GPU's";
  const std::vector<double> keys = random_keys();
  const auto merge = merger({DType::bf16, kHeads, kDim});
  State eager(DType::bf16), replayed(DType::bf16), part(DType::bf16);
  eager.attend(keys, 0, 20);
  replayed.attend(keys, 0, 20);
  part.attend(keys, 20, 40);
  const AttentionState other = part.view(), into = replayed.view();
  merge->merge(eager.view(), other, kTokens);
  gpu::synchronize(nullptr);  // the other stream does not wait for what this one uploads
  const gpu::OwnedStream stream;
  const gpu::Graph graph = gpu::Graph::capture(
      stream.get(), [&](Stream capturing) { merge->merge(into, other, kTokens, capturing); });
  graph.launch(stream.get());
  gpu::synchronize(stream.get());
  eager.read();
  replayed.read();
  EXPECT_EQ(eager.bytes(), replayed.bytes());
}

TEST_F(StateMergers, NamesWhatIsWrong) {
  expect_invalid("heads is 0, must be positive", [&] { merger({DType::bf16, 0, kDim}); });
  expect_invalid("dim is -2, must be positive", [&] { merger({DType::bf16, kHeads, -2}); });
  expect_invalid("a token has 33554432 values in its heads", [&] {
    merger({DType::bf16, 1 << 12, 1 << 13});
  });
  expect_invalid("dtype is DType(17)", [&] { merger({static_cast<DType>(17), kHeads, kDim}); });
  for (const DType dtype : {DType::f8e4m3, DType::i32}) {
    expect_invalid("accepted: fp32, bf16, fp16", [&] { merger({dtype, kHeads, kDim}); });
  }
  if (test::on_gpu()) {
    test::expect_error(ErrorCode::unsupported, "dtype is fp32, on a GPU accepted: bf16, fp16", [&] {
      merger({DType::f32, kHeads, kDim});
    });
    test::expect_error(ErrorCode::unsupported, "dim is 71, must be even", [&] {
      merger({DType::bf16, kHeads, 71});
    });
  } else {
    expect_invalid("threads is null", [] { make_state_merger({DType::f32, 1, 1}, {}, nullptr); });
  }
  const auto merge = merger({DType::bf16, kHeads, kDim});
  State one(DType::bf16), two(DType::bf16), other(DType::f16);
  const AttentionState into = one.view(), part = two.view();
  for (const int64_t tokens : {int64_t{-1}, int64_t{1} << 40}) {
    expect_invalid("tokens is " + std::to_string(tokens),
                   [&] { merge->merge(into, part, tokens); });
  }
  expect_invalid("into.lse is null", [&] { merge->merge({into.out, {}}, part, 1); });
  expect_invalid("part.out is null", [&] { merge->merge(into, {{}, part.lse}, 1); });
  expect_invalid("part.out is fp16, the merger's shape has bf16",
                 [&] { merge->merge(into, other.view(), 1); });
  const std::vector<std::pair<const char*, std::function<void(AttentionState&, AttentionState&)>>>
      wrong = {
          {"into.out has strides of 0 a token and 80 a head: rows of 70 values overlap",
           [](auto& to, auto&) { to.out.token_stride = 0; }},
          {"into.out has strides of 256 a token and 60 a head",
           [](auto& to, auto&) { to.out.head_stride = 60; }},
          {"into.out has strides of -256 a token",
           [](auto& to, auto&) { to.out.token_stride *= -1; }},
          {"into.out at", [](auto& to, auto&) { to.out.token_stride = kFar; }},
          {"part.out at", [](auto&, auto& from) { from.out.head_stride = kFar; }},
          {"into.out is at", [](auto& to, auto&) { step(to.out.data); }},
          {"part.out is at", [](auto&, auto& from) { step(from.out.data); }},
          {"into.lse is at", [](auto& to, auto&) { step(to.lse.data); }},
          {"part.lse is at", [](auto&, auto& from) { step(from.lse.data); }},
          {"shares memory with part.out at", [](auto& to, auto& from) { from.out = to.out; }},
          {"shares memory with part.lse at", [](auto& to, auto& from) { from.lse = to.lse; }},
          {"shares memory with part.lse at",
           [](auto& to, auto& from) { from.lse.data = static_cast<float*>(to.out.data) + 1; }},
          {"shares memory with into.lse at",
           [](auto& to, auto&) { to.lse.data = static_cast<float*>(to.out.data) + 1; }},
      };
  for (const auto& [words, change] : wrong) {
    AttentionState to = into, from = part;
    change(to, from);
    expect_invalid(words, [&] { merge->merge(to, from, 2); });
  }
  AttentionState shared = part;  // rows that are only read may overlap
  shared.out.token_stride = 0;
  EXPECT_NO_THROW(merge->merge(into, shared, 2));
  if (!test::on_gpu()) return;
  AttentionState odd = part;
  odd.out.token_stride += 1;
  expect_invalid("a stride of part.out is 257 elements", [&] { merge->merge(into, odd, 1); });
  odd = part;
  odd.out.data = static_cast<char*>(odd.out.data) + 2;
  expect_invalid("aligned to 4 bytes", [&] { merge->merge(into, odd, 1); });
}

}  // namespace
}  // namespace fovea
