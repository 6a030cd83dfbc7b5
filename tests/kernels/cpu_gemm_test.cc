// SPDX-License-Identifier: Apache-2.0
// The fast matrix product against fp64, and the property that its users rely on: the bits of a row
// depend neither on the other rows nor on the threads.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <tuple>
#include <vector>

#include "core/float_types.h"
#include "fovea/error.h"
#include "kernels/cpu/cpu.h"
#include "kernels/gemm.h"
#include "kernels/reference/reference.h"
#include "support/expect_close.h"
#include "support/isas.h"

namespace fovea::kernels {
namespace {

using test::isas;

#ifdef FOVEA_EMULATED_TILES
// Without AVX-512 no test would multiply by tiles.
class EmulatedTiles : public testing::Environment {
 public:
  void SetUp() override {
    if (!cpu::has_isa(cpu::Isa::avx512)) {
      GTEST_SKIP() << "this processor lacks " << cpu::isa_name(cpu::Isa::avx512)
                   << ", which the emulated tiles need";
    }
  }
};
const auto* const emulated_tiles = testing::AddGlobalTestEnvironment(new EmulatedTiles);
#endif

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// One product with its operands. Weights start at an odd address, as in a mapped file, and end with
// their allocation. Gaps between rows hold NaN.
struct Problem {
  GemmParams params;
  std::vector<float> x, bias, out;
  std::vector<char> weight;
};

struct Shape {
  int32_t rows, n, k;
  DType dtype = DType::f32;
  bool weight_is_kn = false;
};

float uniform(std::mt19937& generator) {
  return std::uniform_real_distribution<float>(-1, 1)(generator);
}

Problem make_problem(const Shape& shape, uint32_t seed) {
  std::mt19937 generator(seed);
  Problem problem;
  GemmParams& params = problem.params;
  params.rows = shape.rows;
  params.n = shape.n;
  params.k = shape.k;
  params.weight_dtype = shape.dtype;
  params.weight_is_kn = shape.weight_is_kn;
  params.x_stride = shape.k + 3;
  params.out_stride = shape.n + 5;
  const int64_t weight_rows = shape.weight_is_kn ? shape.k : shape.n;
  const int64_t weight_columns = shape.weight_is_kn ? shape.n : shape.k;
  params.weight_stride = weight_columns + 2;
  problem.x.assign(static_cast<size_t>(shape.rows * params.x_stride), kNan);
  for (int64_t row = 0; row < shape.rows; ++row) {
    for (int64_t k = 0; k < shape.k; ++k) {
      problem.x[static_cast<size_t>(row * params.x_stride + k)] = uniform(generator);
    }
  }
  const int64_t elements =
      weight_rows == 0 ? 0 : (weight_rows - 1) * params.weight_stride + weight_columns;
  problem.weight.resize(static_cast<size_t>(elements) * dtype_bytes(shape.dtype) + 1);
  char* weight = problem.weight.data() + 1;
  for (int64_t i = 0; i < elements; ++i) {
    const bool inside = i % params.weight_stride < weight_columns;
    store_float(weight, shape.dtype, i, inside ? uniform(generator) : kNan);
  }
  problem.bias.resize(static_cast<size_t>(shape.n));
  for (float& value : problem.bias) value = uniform(generator);
  problem.out.assign(static_cast<size_t>(shape.rows * params.out_stride), kNan);
  params.x = problem.x.data();
  params.weight = weight;
  params.bias = problem.bias.data();
  params.out = problem.out.data();
  return problem;
}

// Returns the largest error of a plain f32 loop. An f32 product may have twice that error.
double error_of_plain_loop(const Problem& problem, const std::vector<float>& exact) {
  const GemmParams& params = problem.params;
  double largest = 0;
  for (int64_t row = 0; row < params.rows; ++row) {
    for (int64_t n = 0; n < params.n; ++n) {
      float sum = params.bias[n];
      for (int64_t k = 0; k < params.k; ++k) {
        const int64_t at =
            params.weight_is_kn ? k * params.weight_stride + n : n * params.weight_stride + k;
        sum += params.x[row * params.x_stride + k] *
               load_float(params.weight, params.weight_dtype, at);
      }
      const auto element = static_cast<size_t>(row * params.out_stride + n);
      largest = std::max(largest, std::fabs(static_cast<double>(sum) - exact[element]));
    }
  }
  return largest;
}

void expect_matches_reference(const Shape& shape) {
  ThreadPool threads(2);
  Problem expected = make_problem(shape, 1);
  reference::gemm(expected.params, threads);
  // Running sums of values in [-1, 1] grow as sqrt(k). A few of their ulp are added, as the loop's
  // error may be small by chance.
  const double ulps = 4 * std::numeric_limits<float>::epsilon() * std::sqrt(shape.k + 1.0);
  const double error = 2 * error_of_plain_loop(expected, expected.out) + ulps;
  for (const cpu::Isa isa : isas()) {
    Problem actual = make_problem(shape, 1);
    cpu::gemm(actual.params, threads, isa);
    for (size_t i = 0; i < actual.out.size(); ++i) {
      const bool inside = static_cast<int64_t>(i) % actual.params.out_stride < shape.n;
      if (!inside) {
        ASSERT_TRUE(std::isnan(actual.out[i])) << "wrote between rows at " << i;
        continue;
      }
      ASSERT_TRUE(test::is_near(actual.out[i], expected.out[i], error))
          << cpu::isa_name(isa) << " rows " << shape.rows << " n " << shape.n << " k " << shape.k
          << " dtype " << dtype_name(shape.dtype) << " kn " << shape.weight_is_kn << " at " << i;
    }
  }
}

class GemmWeights : public testing::TestWithParam<std::tuple<DType, bool>> {};

TEST_P(GemmWeights, MatchReferenceAtEveryEdge) {
  const auto [dtype, is_kn] = GetParam();
  for (const int32_t rows : {1, 2, 3, 4, 6, 7, 25}) {
    for (const int32_t n : {1, 4, 15, 64, 67, 131}) {
      for (const int32_t k : {1, 8, 16, 33, 513}) {
        expect_matches_reference({rows, n, k, dtype, is_kn});
      }
    }
  }
}

TEST_P(GemmWeights, RowsHaveTheSameBitsAloneAndInAnyBatch) {
  const auto [dtype, is_kn] = GetParam();
  const Shape shape = {50, 150, 1100, dtype, is_kn};
  for (const cpu::Isa isa : isas()) {
    ThreadPool one(1), three(3);
    Problem whole = make_problem(shape, 2);
    cpu::gemm(whole.params, one, isa);
    for (const int32_t rows : {1, 2, 5, 6, 7, 24, 31}) {
      for (const int32_t first : {0, 11, 19}) {
        Problem part = make_problem(shape, 2);
        part.params.x += first * part.params.x_stride;
        part.params.rows = rows;
        cpu::gemm(part.params, three, isa);
        for (int64_t row = 0; row < rows; ++row) {
          ASSERT_EQ(std::memcmp(part.params.out + row * part.params.out_stride,
                                whole.params.out + (first + row) * whole.params.out_stride,
                                sizeof(float) * static_cast<size_t>(shape.n)),
                    0)
              << cpu::isa_name(isa) << " row " << first + row << " in a batch of " << rows;
        }
      }
    }
  }
}

// The same for random shapes, batches and teams of threads.
TEST(Gemm, BitsOfARowDependOnThatRowAlone) {
  const bool holds = rc::check("row alone == row in a batch", [] {
    const Shape shape = {
        *rc::gen::inRange(1, 60), *rc::gen::inRange(1, 200), *rc::gen::inRange(0, 1300),
        *rc::gen::element(DType::f32, DType::bf16, DType::f16), *rc::gen::arbitrary<bool>()};
    const auto row = *rc::gen::inRange(0, shape.rows);
    const auto isa = *rc::gen::elementOf(isas());
    ThreadPool one(1), team(*rc::gen::inRange(1, 5));
    Problem batch = make_problem(shape, 9);
    cpu::gemm(batch.params, team, isa);
    Problem alone = make_problem(shape, 9);
    alone.params.x += row * alone.params.x_stride;
    alone.params.rows = 1;
    cpu::gemm(alone.params, one, isa);
    RC_ASSERT(std::memcmp(alone.params.out, batch.params.out + row * batch.params.out_stride,
                          sizeof(float) * static_cast<size_t>(shape.n)) == 0);
  });
  EXPECT_TRUE(holds);
}

// Columns too: a weight that is cut in two, as across devices, gives the bits of the whole.
TEST_P(GemmWeights, ColumnsHaveTheSameBitsWhereverTheyAreCut) {
  const auto [dtype, is_kn] = GetParam();
  ThreadPool threads(2);
  Problem whole = make_problem({9, 150, 700, dtype, is_kn}, 3);
  cpu::gemm(whole.params, threads);
  Problem part = make_problem({9, 150, 700, dtype, is_kn}, 3);
  const int64_t first = 37;
  part.params.weight =
      static_cast<const char*>(part.params.weight) +
      first * (is_kn ? 1 : part.params.weight_stride) * static_cast<int64_t>(dtype_bytes(dtype));
  part.params.bias += first;
  part.params.n -= static_cast<int32_t>(first);
  cpu::gemm(part.params, threads);
  for (int64_t row = 0; row < 9; ++row) {
    ASSERT_EQ(std::memcmp(part.params.out + row * part.params.out_stride,
                          whole.params.out + row * whole.params.out_stride + first,
                          sizeof(float) * static_cast<size_t>(part.params.n)),
              0);
  }
}

// Products that share tasks differ in size, and one of them has no columns.
TEST_P(GemmWeights, ProductsHaveTheSameBitsTogether) {
  const auto [dtype, is_kn] = GetParam();
  const Shape shapes[] = {{3, 300, 700, dtype, is_kn}, {3, 0, 700, dtype}, {3, 67, 90, dtype}};
  for (const cpu::Isa isa : isas()) {
    ThreadPool threads(3);
    std::vector<Problem> together, alone;
    std::vector<GemmParams> products;
    for (const Shape& shape : shapes) {
      alone.push_back(make_problem(shape, 4));
      cpu::gemm(alone.back().params, threads, isa);
      together.push_back(make_problem(shape, 4));
      products.push_back(together.back().params);
    }
    cpu::gemms(products, threads, isa);
    for (size_t i = 0; i < products.size(); ++i) {
      EXPECT_EQ(std::memcmp(together[i].out.data(), alone[i].out.data(),
                            sizeof(float) * alone[i].out.size()),
                0)
          << cpu::isa_name(isa) << ", product " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GemmWeights,
                         testing::Combine(testing::Values(DType::f32, DType::bf16, DType::f16),
                                          testing::Bool()));

TEST(Gemm, LargeProductMatchesReference) {
  expect_matches_reference({65, 259, 2050, DType::bf16, false});
  expect_matches_reference({65, 259, 2050, DType::bf16, true});
}

// The last element of the weight ends a mapping, so that reading past it would fault.
TEST(Gemm, ReadsNothingBeyondTheWeight) {
  ThreadPool threads(1);
  constexpr size_t kPage = 4096;
  char* pages = static_cast<char*>(
      mmap(nullptr, 2 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(pages, MAP_FAILED);
  ASSERT_EQ(mprotect(pages + kPage, kPage, PROT_NONE), 0);
  for (const bool is_kn : {false, true}) {
    for (const int32_t rows : {1, 40}) {
      for (const cpu::Isa isa : isas()) {
        GemmParams params;
        params.rows = rows;
        params.n = 13;
        params.k = 37;
        params.weight_dtype = DType::bf16;
        params.weight_is_kn = is_kn;
        params.weight_stride = is_kn ? params.n : params.k;
        params.weight = pages + kPage - 2 * 13 * 37;
        const std::vector<float> x(static_cast<size_t>(rows * params.k), 1);
        std::vector<float> out(static_cast<size_t>(rows * params.n), kNan);
        params.x = x.data();
        params.x_stride = params.k;
        params.out = out.data();
        params.out_stride = params.n;
        cpu::gemm(params, threads, isa);
        for (const float value : out) EXPECT_EQ(value, 0);
      }
    }
  }
  munmap(pages, 2 * kPage);
}

TEST(Gemm, EmptySumsGiveTheBias) {
  ThreadPool threads(2);
  Problem problem = make_problem({8, 5, 0}, 4);
  cpu::gemm(problem.params, threads);
  for (int64_t row = 0; row < 8; ++row) {
    for (int64_t n = 0; n < 5; ++n) {
      EXPECT_EQ(problem.params.out[row * problem.params.out_stride + n], problem.bias[n]);
    }
  }
  Problem no_rows = make_problem({0, 5, 7}, 4);
  cpu::gemm(no_rows.params, threads);
  Problem no_columns = make_problem({5, 0, 7}, 4);
  cpu::gemm(no_columns.params, threads);
}

TEST(Gemm, NanStaysInItsRow) {
  ThreadPool threads(1);
  Problem problem = make_problem({9, 70, 40, DType::bf16, false}, 5);
  problem.x[static_cast<size_t>(4 * problem.params.x_stride + 39)] = kNan;
  cpu::gemm(problem.params, threads);
  for (int64_t row = 0; row < 9; ++row) {
    for (int64_t n = 0; n < 70; ++n) {
      EXPECT_EQ(std::isnan(problem.params.out[row * problem.params.out_stride + n]), row == 4);
    }
  }
}

TEST(Gemm, RefusesWhatItCannotMultiply) {
  ThreadPool threads(1);
  Problem problem = make_problem({2, 4, 8}, 6);
  problem.params.weight_dtype = DType::f8e4m3;
  EXPECT_THROW(cpu::gemm(problem.params, threads), Error);
  problem = make_problem({2, 4, 8}, 6);
  problem.params.weight_stride = 7;
  EXPECT_THROW(cpu::gemm(problem.params, threads), Error);
  const std::vector<GemmParams> many(cpu::kMaxGemms + 1, make_problem({2, 4, 8}, 6).params);
  EXPECT_THROW(cpu::gemms(many, threads), Error);
}

}  // namespace
}  // namespace fovea::kernels
