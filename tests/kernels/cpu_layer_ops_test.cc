// SPDX-License-Identifier: Apache-2.0
// Row operations of the model layer against fp64 formulas in this file, and two rules for all of
// them: rows do not affect each other, threads do not change bits.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "core/float_types.h"
#include "fovea/error.h"
#include "kernels/layer_ops.h"
#include "support/expect_close.h"
#include "support/random_values.h"

namespace fovea::kernels {
namespace {

using test::random_values;

double silu(double x) { return x / (1 + std::exp(-x)); }
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// Compares the f32 result of a short formula with fp64.
void expect_close(float actual, double expected, const char* what, size_t index) {
  EXPECT_TRUE(test::is_near(actual, expected, 2e-6 * (1 + std::fabs(expected))))
      << what << " at " << index;
}

TEST(RmsNorm, MatchesFormulaWithStridesWeightOffsetAndGate) {
  ThreadPool threads(2);
  constexpr int32_t kRows = 37, kHeads = 3, kDim = 83;
  const int64_t head_stride = kDim + 5, row_stride = kHeads * head_stride + 7;
  std::vector<float> x = random_values(kRows * row_stride, 1);
  const std::vector<float> before = x;
  std::vector<float> gate = random_values(kRows * kHeads * kDim, 2);
  const std::vector<float> weight = random_values(kDim, 3);
  RmsNormParams params;
  params.x = params.out = {x.data(), row_stride, head_stride};
  params.gate = {gate.data(), kHeads * kDim, kDim};
  params.weight = weight.data();
  params.weight_plus_one = true;
  params.epsilon = 1e-5f;
  params.rows = kRows;
  params.heads = kHeads;
  params.dim = kDim;
  rms_norm(params, threads);
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t h = 0; h < kHeads; ++h) {
      const float* source = before.data() + row * row_stride + h * head_stride;
      const double squares = std::inner_product(source, source + kDim, source, 0.0);
      for (int32_t i = 0; i < kDim; ++i) {
        const double expected = source[i] / std::sqrt(squares / kDim + 1e-5) * (1.0 + weight[i]) *
                                silu(gate[(row * kHeads + h) * kDim + i]);
        expect_close(x[row * row_stride + h * head_stride + i], expected, "rms_norm", i);
      }
      for (int64_t i = kDim; i < head_stride; ++i) {
        EXPECT_EQ(x[row * row_stride + h * head_stride + i], source[i]) << "padding was written";
      }
    }
  }
}

TEST(RmsNorm, GatesFirstWithWeightsOfEachHead) {
  ThreadPool threads(2);
  constexpr int32_t kRows = 9, kHeads = 3, kDim = 21;
  const std::vector<float> x = random_values(kRows * kHeads * kDim, 1);
  const std::vector<float> gate = random_values(kRows * kHeads * kDim, 2, -4, 4);
  const std::vector<float> weight = random_values(kHeads * kDim, 3);
  std::vector<float> out = x;
  RmsNormParams params;
  params.x = params.out = {out.data(), kHeads * kDim, kDim};
  params.gate = {const_cast<float*>(gate.data()), kHeads * kDim, kDim};
  params.gate_function = NormGate::silu_before;
  params.weight = weight.data();
  params.weight_head_stride = kDim;
  params.epsilon = 1e-3f;
  params.rows = kRows;
  params.heads = kHeads;
  params.dim = kDim;
  rms_norm(params, threads);
  for (size_t head = 0; head < kRows * kHeads; ++head) {
    const auto product = [&](size_t i) { return x[head * kDim + i] * silu(gate[head * kDim + i]); };
    double squares = 0;
    for (size_t i = 0; i < kDim; ++i) squares += product(i) * product(i);
    for (size_t i = 0; i < kDim; ++i) {
      const double norm = product(i) / std::sqrt(squares / kDim + 1e-3);
      expect_close(out[head * kDim + i], norm * weight[head % kHeads * kDim + i], "norm", i);
    }
  }
}

// Three parts of rows give the norm of the whole ones.
TEST(DividedNorm, IsTheNormOfAllParts) {
  ThreadPool threads(2);
  constexpr size_t kRows = 9, kParts = 3, kDim = 21, kWidth = kParts * kDim;
  const std::vector<float> x = random_values(kRows * kWidth, 1);
  const std::vector<float> gate = random_values(kRows * kWidth, 2, -4, 4);
  const std::vector<float> weight = random_values(kWidth, 3);
  for (const bool has_gate : {false, true}) {
    std::vector<float> out = x, sums(kRows), squares(kRows);
    DividedNormParams params;
    params.x_row_stride = params.gate_row_stride = params.out_row_stride = kWidth;
    params.weight_plus_one = !has_gate;
    params.epsilon = 1e-3f;
    params.rows = kRows;
    params.dim = kDim;
    params.parts = kParts;
    const auto for_parts = [&](const auto& body) {
      for (size_t part = 0; part < kParts; ++part) {
        params.x = params.out = out.data() + part * kDim;
        params.gate = has_gate ? gate.data() + part * kDim : nullptr;
        params.weight = weight.data() + part * kDim;
        body();
      }
    };
    params.squares = squares.data();
    for_parts([&] {
      divided_norm_squares(params, threads);
      for (size_t row = 0; row < kRows; ++row) sums[row] += squares[row];
    });
    params.squares = sums.data();
    for_parts([&] { divided_norm_scale(params, threads); });
    for (size_t row = 0; row < kRows; ++row) {
      const auto product = [&](size_t i) {
        return x[row * kWidth + i] * (has_gate ? silu(gate[row * kWidth + i]) : 1);
      };
      double all = 0;
      for (size_t i = 0; i < kWidth; ++i) all += product(i) * product(i);
      for (size_t i = 0; i < kWidth; ++i) {
        const double norm = product(i) / std::sqrt(all / kWidth + 1e-3);
        expect_close(out[row * kWidth + i], norm * (weight[i] + (has_gate ? 0 : 1)), "norm", i);
      }
    }
  }
}

TEST(KdaGates, InPlaceForEachChannel) {
  ThreadPool threads(2);
  constexpr size_t kRows = 7, kHeads = 3, kDim = 5, kWidth = kHeads * kDim;
  const std::vector<float> raw = random_values(kRows * kWidth, 1, -30, 30);
  const std::vector<float> strengths = random_values(kRows * kHeads, 2, -4, 4);
  const std::vector<float> a_log = random_values(kHeads, 3, -2, 2);
  const std::vector<float> dt_bias = random_values(kWidth, 4, -2, 2);
  std::vector<float> log_decay = raw, beta = strengths;
  kda_gates({.a_log = a_log.data(),
             .dt_bias = dt_bias.data(),
             .log_decay = log_decay.data(),
             .beta = beta.data(),
             .rows = kRows,
             .heads = kHeads,
             .key_dim = kDim},
            threads);
  for (size_t i = 0; i < raw.size(); ++i) {
    const double rate = std::exp(double{a_log[i / kDim % kHeads]});
    const double step = std::log1p(std::exp(double{raw[i]} + dt_bias[i % kWidth]));
    expect_close(log_decay[i], -rate * step, "decay", i);
  }
  for (size_t i = 0; i < beta.size(); ++i) {
    expect_close(beta[i], 1 / (1 + std::exp(-double{strengths[i]})), "beta", i);
  }
}

TEST(Mamba2Inputs, SplitAndLimited) {
  ThreadPool threads(2);
  constexpr int32_t kRows = 5, kValues = 12, kConv = 20, kHeads = 3;
  constexpr size_t kWidth = kValues + kConv + kHeads;
  const std::vector<float> projected = random_values(kRows * kWidth, 1, -30, 30);
  const std::vector<float> a_log = random_values(kHeads, 2, -2, 2);
  const std::vector<float> dt_bias = random_values(kHeads, 3, -2, 2);
  std::vector<float> z(kRows * kValues), mixed(kRows * kConv);
  std::vector<float> log_decay(kRows * kHeads), dt(kRows * kHeads);
  Mamba2InputsParams params;
  params.projected = projected.data();
  params.a_log = a_log.data();
  params.dt_bias = dt_bias.data();
  params.dt_min = 0.25f;
  params.dt_max = 9;
  params.z = z.data();
  params.mixed = mixed.data();
  params.log_decay = log_decay.data();
  params.dt = dt.data();
  params.rows = kRows;
  params.values = kValues;
  params.conv_dim = kConv;
  params.heads = kHeads;
  mamba2_inputs(params, threads);
  size_t limited = 0;
  for (size_t row = 0; row < kRows; ++row) {
    const float* from = projected.data() + row * kWidth;
    for (size_t i = 0; i < kValues; ++i) EXPECT_EQ(z[row * kValues + i], from[i]);
    for (size_t i = 0; i < kConv; ++i) EXPECT_EQ(mixed[row * kConv + i], from[kValues + i]);
    for (size_t h = 0; h < kHeads; ++h) {
      const double raw = std::log1p(std::exp(double{from[kValues + kConv + h]} + dt_bias[h]));
      const double step = std::min(std::max(raw, 0.25), 9.0);
      limited += step != raw ? 1 : 0;
      expect_close(dt[row * kHeads + h], step, "dt", h);
      expect_close(log_decay[row * kHeads + h], -std::exp(double{a_log[h]}) * step, "decay", h);
    }
  }
  EXPECT_GT(limited, 0u);
  EXPECT_LT(limited, size_t{kRows * kHeads});
}

TEST(RmsNorm, WithoutWeightIsTheL2Norm) {
  ThreadPool threads(1);
  std::vector<float> x = {3, 4, 0, 0};
  std::vector<float> out(4);
  RmsNormParams params;
  params.x = {x.data(), 4, 4};
  params.out = {out.data(), 4, 4};
  params.rows = 1;
  params.dim = 4;
  rms_norm(params, threads);
  EXPECT_FLOAT_EQ(out[0], 3 / 2.5f);
  EXPECT_FLOAT_EQ(out[1], 4 / 2.5f);
  EXPECT_EQ(x[0], 3);
}

TEST(SigmoidGate, PerElementAndPerHead) {
  ThreadPool threads(1);
  constexpr int32_t kDim = 6;
  for (const int32_t gate_dim : {1, kDim}) {
    std::vector<float> x = random_values(2 * 2 * kDim, 6);
    const std::vector<float> before = x;
    std::vector<float> gate = random_values(2 * 2 * gate_dim, 7);
    SigmoidGateParams params;
    params.x = {x.data(), 2 * kDim, kDim};
    params.gate = {gate.data(), 2 * gate_dim, gate_dim};
    params.rows = 2;
    params.heads = 2;
    params.dim = kDim;
    params.gate_dim = gate_dim;
    sigmoid_gate(params, threads);
    for (size_t i = 0; i < x.size(); ++i) {
      const double g = gate_dim == 1 ? gate[i / kDim] : gate[i];
      expect_close(x[i], before[i] * sigmoid(g), "sigmoid_gate", i);
    }
  }
}

TEST(DeltaGates, MatchFormulasOverTheWholeRange) {
  ThreadPool threads(1);
  const std::vector<float> a = {-90, -3, 0, 4, 30, 90}, b = {-90, -1, 0, 1, 20, 90};
  const std::vector<float> a_log(6, 0.5f), dt_bias(6, 0.25f);
  std::vector<float> decay(6), beta(6);
  DeltaGateParams params;
  params.a = a.data();
  params.b = b.data();
  params.a_log = a_log.data();
  params.dt_bias = dt_bias.data();
  params.log_decay = decay.data();
  params.beta = beta.data();
  params.rows = 1;
  params.heads = 6;
  delta_gates(params, threads);
  for (size_t h = 0; h < 6; ++h) {
    expect_close(decay[h], -std::exp(0.5) * std::log1p(std::exp(a[h] + 0.25)), "decay", h);
    expect_close(beta[h], sigmoid(b[h]), "beta", h);
  }
}

TEST(Elementwise, AddCapAndRowFactors) {
  ThreadPool threads(3);
  const size_t count = 40001;
  const std::vector<float> x = random_values(count, 8, -60, 60), y = random_values(count, 9);
  std::vector<float> sum = x, capped = x, rows = x;
  add(sum.data(), y.data(), 1, count, threads);
  soft_cap(capped.data(), 30, count, threads);
  ScaleRowsParams params;
  params.x = {rows.data(), 10, 5};
  std::vector<int32_t> positions(4000);
  for (int32_t row = 0; row < 4000; ++row) positions[row] = row * 7;
  params.scale = {.factor = 0.1f, .floor_scale = 512};
  params.positions = positions.data();
  params.rows = 4000;
  params.heads = 2;
  params.dim = 5;
  scale_rows(params, threads);
  for (size_t i = 0; i < count; ++i) {
    EXPECT_EQ(sum[i], x[i] + y[i]);
    expect_close(capped[i], 30 * std::tanh(x[i] / 30.0), "soft_cap", i);
    const double steps = std::floor(static_cast<double>(i / 10 * 7 + 1) / 512);
    const double factor = i < 40000 ? 1 + 0.1 * std::log1p(steps) : 1;
    expect_close(rows[i], x[i] * factor, "scale_rows", i);
  }
}

TEST(Embedding, ConvertsRowsOfEveryDtypeAtAnyAlignment) {
  ThreadPool threads(2);
  constexpr int32_t kDim = 33, kTableRows = 20;
  const std::vector<float> values = random_values(kTableRows * kDim, 10);
  const std::vector<int32_t> ids = {0, 19, 7, 7};
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    std::vector<char> bytes(values.size() * dtype_bytes(dtype) + 1);
    for (size_t i = 0; i < values.size(); ++i) {
      store_float(bytes.data() + 1, dtype, static_cast<int64_t>(i), values[i]);
    }
    std::vector<float> out(ids.size() * kDim);
    EmbeddingParams params;
    params.table = bytes.data() + 1;
    params.dtype = dtype;
    params.table_rows = kTableRows;
    params.ids = ids.data();
    params.out = out.data();
    params.rows = static_cast<int64_t>(ids.size());
    params.dim = kDim;
    params.factor = 2;
    embedding(params, threads);
    for (size_t i = 0; i < out.size(); ++i) {
      const auto element = static_cast<int64_t>(ids[i / kDim] * kDim + i % kDim);
      EXPECT_EQ(out[i], 2 * load_float(bytes.data() + 1, dtype, element));
    }
    const int32_t bad = kTableRows;
    params.ids = &bad;
    params.rows = 1;
    EXPECT_THROW(embedding(params, threads), Error);
  }
}

TEST(ExpertRows, GatherThenScatterAddsWeightedRows) {
  ThreadPool threads(2);
  constexpr int32_t kDim = 4;
  const std::vector<float> x = random_values(5 * kDim, 11);
  const std::vector<int32_t> index = {4, 1};
  const std::vector<float> weight = {0.5f, -2};
  std::vector<float> gathered(2 * kDim);
  std::vector<float> out(5 * kDim, 1);
  ExpertRowsParams params{x.data(), kDim, gathered.data(), kDim, index.data(), weight.data(),
                          2,        kDim};
  gather_rows(params, threads);
  params.x = gathered.data();
  params.out = out.data();
  params.weight = nullptr;
  scatter_add_rows(params, threads);
  for (size_t i = 0; i < out.size(); ++i) {
    const float w = i / kDim == 4 ? 0.5f : i / kDim == 1 ? -2 : 0;
    EXPECT_EQ(out[i], 1 + w * x[i]);
  }
}

// Every operation gives the same bits for a row alone and in a batch, with any number of threads.
TEST(LayerOps, RowsAreIndependentOfBatchAndThreads) {
  constexpr int32_t kRows = 300, kDim = 129;
  const std::vector<float> x = random_values(kRows * kDim, 12);
  const std::vector<float> gate = random_values(kRows * kDim, 13);
  const auto run = [&](int64_t first, int64_t rows, int team) {
    ThreadPool threads(team);
    std::vector<float> out(x.begin() + first * kDim, x.begin() + (first + rows) * kDim);
    RmsNormParams norm;
    norm.x = norm.out = {out.data(), kDim, kDim};
    norm.rows = rows;
    norm.dim = kDim;
    norm.epsilon = 1e-6f;
    rms_norm(norm, threads);
    GatedActivationParams activation;
    activation.gate = out.data();
    activation.up = gate.data() + first * kDim;
    activation.in_row_stride = activation.out_row_stride = kDim;
    activation.out = out.data();
    activation.rows = rows;
    activation.dim = kDim;
    gated_activation(activation, threads);
    return out;
  };
  const std::vector<float> all = run(0, kRows, 1);
  EXPECT_EQ(all, run(0, kRows, 3));
  for (const int64_t row : {0, 1, 150, 299}) {
    const std::vector<float> alone = run(row, 1, 1);
    EXPECT_EQ(alone, std::vector<float>(all.begin() + row * kDim, all.begin() + (row + 1) * kDim));
  }
}

TEST(LayerOps, NoRowsIsNoWork) {
  ThreadPool threads(2);
  rms_norm({}, threads);
  gated_activation({}, threads);
  sigmoid_gate({}, threads);
  delta_gates({}, threads);
  scale_rows({}, threads);
  embedding({}, threads);
  gather_rows({}, threads);
  scatter_add_rows({}, threads);
  add(nullptr, nullptr, 1, 0, threads);
}

}  // namespace
}  // namespace fovea::kernels
