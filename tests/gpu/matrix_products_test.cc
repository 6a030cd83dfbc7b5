// SPDX-License-Identifier: Apache-2.0
// Products with the shapes of real models, and operands at every kind of address.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "core/float_types.h"
#include "gpu/cublaslt.h"
#include "support/bf16_noise.h"
#include "support/device_array.h"
#include "support/gpu_kernel_test.h"

namespace fovea::gpu {
namespace {

constexpr size_t k4GiB = size_t{1} << 32;
constexpr int32_t kMaxRows = 16384;

// The sizes of a model that determine its products. `q_rank` and `kv_rank` are for MLA.
struct Model {
  const char* name;
  int32_t hidden, q_heads, kv_heads, head_dim, width, vocabulary;
  int32_t experts = 0;
  int32_t q_rank = 0, kv_rank = 0, dense_width = 0;
};

// "/8" is a model's share on one of eight GPUs.
constexpr Model kModels[] = {
    {"Llama-3.2-1B", 2048, 32, 8, 64, 8192, 128256},
    {"Llama-3.1-8B", 4096, 32, 8, 128, 14336, 128256},
    {"Llama-3.1-70B/8", 8192, 8, 1, 128, 3584, 16032},
    {"Qwen3-0.6B", 1024, 16, 8, 128, 3072, 151936},
    {"Qwen3-8B", 4096, 32, 8, 128, 12288, 151936},
    {"Qwen3-32B", 5120, 64, 8, 128, 25600, 151936},
    {"Gemma-2-2B", 2304, 8, 4, 256, 9216, 256000},
    {"Gemma-2-9B", 3584, 16, 8, 256, 14336, 256000},
    {"gpt-oss-20b", 2880, 64, 8, 64, 2880, 201088, 32},
    {"Mistral-7B", 4096, 32, 8, 128, 14336, 32768},
    {"DeepSeek-V3/8", 7168, 16, 16, 192, 256, 16160, 256, 1536, 576, 2304},
    {"Qwen3-30B-A3B", 2048, 32, 4, 128, 768, 151936, 128},
};

struct Product {
  int32_t n, k;
  DType out;
  bool bias = false;
};

// Returns the products of a layer, and the vocabulary head.
std::vector<Product> products_of(const Model& m) {
  const int32_t q = m.q_heads * m.head_dim, kv = m.kv_heads * m.head_dim;
  const bool bias = std::string_view(m.name).starts_with("gpt-oss");
  std::vector<Product> products;
  if (m.kv_rank == 0) {
    products.push_back({q + 2 * kv, m.hidden, DType::bf16, bias});
    products.push_back({m.hidden, q, DType::f32, bias});
  } else {
    products.push_back({m.q_rank, m.hidden, DType::bf16});
    products.push_back({q, m.q_rank, DType::bf16});
    products.push_back({m.kv_rank, m.hidden, DType::bf16});
    products.push_back({m.hidden, m.q_heads * 128, DType::f32});
  }
  if (m.experts > 0) products.push_back({m.experts, m.hidden, DType::f32, bias});
  for (const int32_t width : {m.width, m.dense_width}) {
    if (width == 0) continue;
    products.push_back({2 * width, m.hidden, DType::bf16});
    products.push_back({m.hidden, width, DType::f32});
  }
  products.push_back({m.vocabulary, m.hidden, DType::f32});
  return products;
}

class MatrixProductsTest : public test::GpuKernelTest<::testing::Test> {
 protected:
  void SetUp() override {
    Base::SetUp();
    if (IsSkipped()) return;
    if (!why_no_cublaslt().empty()) GTEST_SKIP() << why_no_cublaslt();
  }
  using Base = test::GpuKernelTest<::testing::Test>;
};

// Returns one output value in fp64, from bf16 operands on the host.
double dot(const uint16_t* x, const uint16_t* weight, int32_t k) {
  double sum = 0;
  for (int32_t i = 0; i < k; ++i) {
    sum += static_cast<double>(bf16_to_float(x[i])) * bf16_to_float(weight[i]);
  }
  return sum;
}

float read_value(const std::byte* out, DType dtype, int64_t index) {
  float value = 0;
  if (dtype == DType::f32) {
    copy_to_host(&value, out + index * 4, 4, nullptr);
    synchronize(nullptr);
    return value;
  }
  uint16_t code = 0;
  copy_to_host(&code, out + index * 2, 2, nullptr);
  synchronize(nullptr);
  return bf16_to_float(code);
}

// Random bf16 values on the device. They repeat with a prime period, so that rows differ.
class Noise {
 public:
  Noise(size_t count, uint32_t seed)
      : buffer_(count * 2), period_(test::bf16_noise(kPeriod, seed)) {
    for (size_t at = 0; at < count; at += kPeriod) {
      copy_to_device(buffer_.data<uint16_t>() + at, period_.data(),
                     std::min(kPeriod, count - at) * 2, nullptr);
    }
    synchronize(nullptr);
  }
  const void* data() const { return buffer_.data(); }
  // Returns values [first, first + count).
  std::vector<uint16_t> values(size_t first, size_t count) const {
    std::vector<uint16_t> result(count);
    for (size_t i = 0; i < count; ++i) result[i] = period_[(first + i) % kPeriod];
    return result;
  }

 private:
  static constexpr size_t kPeriod = 1'000'003;
  DeviceBuffer buffer_;
  std::vector<uint16_t> period_;
};

// The largest operands of all tested products. Each product uses the front of them.
struct Operands {
  Operands(size_t x_count, size_t weight_count) : x(x_count, 11), weight(weight_count, 12) {}
  Noise x, weight;
};

MatmulParams params_of(const Product& p, int32_t rows) {
  MatmulParams params;
  params.out_dtype = p.out;
  params.x_stride = params.weight_stride = p.k;
  params.out_stride = p.n;
  params.rows = rows;
  params.n = p.n;
  params.k = p.k;
  return params;
}

// Compares the first and the last value of the result with fp64.
void expect_corners(const Operands& operands, const std::byte* out, const Product& p, int32_t rows,
                    const std::string& what) {
  for (const bool last : {false, true}) {
    const auto k = static_cast<size_t>(p.k);
    const size_t row = last ? static_cast<size_t>(rows) - 1 : 0;
    const size_t column = last ? static_cast<size_t>(p.n) - 1 : 0;
    const std::vector<uint16_t> x = operands.x.values(row * k, k);
    const std::vector<uint16_t> weight = operands.weight.values(column * k, k);
    const double want = dot(x.data(), weight.data(), p.k);
    const double got =
        read_value(out, p.out, static_cast<int64_t>(row * static_cast<size_t>(p.n) + column));
    const double allowed =
        std::fabs(want) * (p.out == DType::f32 ? 1e-5 : 0.004) + 3e-4 * std::sqrt(p.k);
    // NaN fails this comparison too.
    EXPECT_TRUE(std::fabs(got - want) <= allowed)
        << what << ", row " << row << ": got " << got << ", want " << want;
  }
}

// Every product of every model has an algorithm for every number of rows, with every handle.
TEST_F(MatrixProductsTest, EveryShapeOfRealModelsRuns) {
  constexpr int kStarts = 20;
  std::vector<int32_t> row_counts;
  for (int32_t rows = 1; rows <= 64; ++rows) row_counts.push_back(rows);
  for (int32_t rows = 128; rows <= kMaxRows; rows *= 2) row_counts.push_back(rows);
  // The engine computes logits for sampled rows only.
  constexpr int32_t kMaxLogitRows = 1024;
  size_t x_count = 0, weight_count = 0, out_bytes = 0;
  const auto rows_fit = [](const Product& p, int32_t rows) {
    return p.out == DType::bf16 || p.n < 1 << 14 || rows <= kMaxLogitRows;
  };
  for (const Model& model : kModels) {
    for (const Product& p : products_of(model)) {
      const auto n = static_cast<size_t>(p.n), k = static_cast<size_t>(p.k);
      x_count = std::max(x_count, k * kMaxRows);
      weight_count = std::max(weight_count, n * k);
      const auto rows = static_cast<size_t>(rows_fit(p, kMaxRows) ? kMaxRows : kMaxLogitRows);
      out_bytes = std::max(out_bytes, n * rows * dtype_bytes(p.out));
    }
  }
  const Operands operands(x_count, weight_count);
  const DeviceBuffer out(out_bytes), zeros(size_t{1} << 21);
  fill_bytes(zeros.data(), 0, zeros.bytes(), nullptr);
  for (int start = 0; start < kStarts; ++start) {
    for (const Model& model : kModels) {
      MatrixProducts products(/*row_invariant=*/false, kMaxRows);
      for (const Product& p : products_of(model)) {
        for (const int32_t rows : row_counts) {
          if (!rows_fit(p, rows)) continue;
          MatmulParams params = params_of(p, rows);
          params.x = operands.x.data();
          params.weight = operands.weight.data();
          params.bias = p.bias ? zeros.data() : nullptr;
          params.out = out.data();
          ASSERT_NO_THROW(products.run(params, nullptr))
              << model.name << ", n " << p.n << ", k " << p.k << ", rows " << rows;
          if (start != 0) continue;
          expect_corners(operands, out.data<std::byte>(), p, rows,
                         std::string(model.name) + ", n " + std::to_string(p.n) + ", rows " +
                             std::to_string(rows));
        }
      }
      synchronize(nullptr);
    }
  }
}

// An operand at a multiple of 4 GiB has every alignment that cuBLASLt asks about.
TEST_F(MatrixProductsTest, OperandsLieAtMultiplesOf4GiB) {
  const Product p = {6144, 4096, DType::bf16};
  constexpr int32_t kRows = 3;
  const Operands operands(size_t{kRows} * 4096, size_t{6144} * 4096);
  const size_t weight_bytes = size_t{6144} * 4096 * 2, out_bytes = size_t{kRows} * 6144 * 2;
  const DeviceBuffer large(k4GiB + weight_bytes), small(out_bytes);
  auto* const round = reinterpret_cast<std::byte*>(
      (reinterpret_cast<uintptr_t>(large.data()) + k4GiB - 1) / k4GiB * k4GiB);
  ASSERT_EQ(reinterpret_cast<uintptr_t>(round) % k4GiB, 0u);
  MatmulParams params = params_of(p, kRows);
  params.x = operands.x.data();
  params.weight = operands.weight.data();
  params.out = small.data();
  MatrixProducts(false, kRows).run(params, nullptr);
  const std::vector<uint16_t> want = test::to_host<uint16_t>(small, out_bytes / 2);
  for (const std::string operand : {"x", "weight", "out"}) {
    MatmulParams moved = params;
    if (operand == "x") {
      copy_to_device(round, operands.x.values(0, size_t{kRows} * 4096).data(),
                     size_t{kRows} * 4096 * 2, nullptr);
      moved.x = round;
    } else if (operand == "weight") {
      const std::vector<uint16_t> weight = operands.weight.values(0, weight_bytes / 2);
      copy_to_device(round, weight.data(), weight_bytes, nullptr);
      moved.weight = round;
    } else {
      moved.out = round;
    }
    synchronize(nullptr);
    MatrixProducts products(false, kRows);
    ASSERT_NO_THROW(products.run(moved, nullptr)) << operand;
    std::vector<uint16_t> got(want.size());
    copy_to_host(got.data(), moved.out, out_bytes, nullptr);
    synchronize(nullptr);
    EXPECT_EQ(got, want) << operand << " at a multiple of 4 GiB";
  }
}

}  // namespace
}  // namespace fovea::gpu
