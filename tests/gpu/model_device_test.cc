// SPDX-License-Identifier: Apache-2.0
// Every operation of a model's layers except its experts, on a GPU against the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "gpu/model_devices.h"
#include "model/json_object.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

TEST_F(ModelDevices, MultiplyAlike) {
  struct Shape {
    int32_t rows, n, k;
    bool is_kn, bias;
    DType out;
  };
  for (const Shape& s :
       {Shape{1, 2048, 128, false, false, DType::f32}, Shape{7, 4, 128, false, true, DType::f32},
        Shape{33, 256, 352, true, true, DType::f32},
        Shape{256, 704, 256, false, false, DType::bf16},
        Shape{5, 512, 1024, false, true, DType::bf16},
        Shape{64, 8, 64, true, false, DType::bf16}}) {
    const std::vector<float> x = random(static_cast<size_t>(s.rows) * s.k);
    const std::vector<float> w = random(static_cast<size_t>(s.n) * s.k, 0.1f);
    const std::vector<float> bias = s.bias ? random(s.n) : std::vector<float>();
    const auto count = static_cast<size_t>(s.rows) * s.n;
    expect_same(
        s.out, s.n,
        [&](Side& side) {
          const bool host = side->kind() == DeviceKind::cpu;
          const Rows out = side.rows(std::vector<float>(count), s.n, host ? DType::f32 : s.out);
          side->linear(side.linear(w, s.n, s.k, s.is_kn, bias), side.activations(x, s.k), out,
                       s.rows);
          return side.read(out, count);
        },
        "n " + std::to_string(s.n));
  }
}

TEST_F(ModelDevices, MultiplyRowsAloneOrTogetherAlike) {
  constexpr int32_t kN = 1024, kK = 512;
  const std::vector<float> x = random(size_t{kMaxRows} * kK), w = random(size_t{kN} * kK, 0.1f);
  Side invariant(make_cuda_device({.max_rows = kMaxRows, .row_invariant = true}));
  const Linear weights = invariant.linear(w, kN, kK, false);
  const Rows in = invariant.activations(x, kK);
  const Rows out = invariant.floats(std::vector<float>(size_t{kMaxRows} * kN), kN);
  invariant->linear(weights, in, out, kMaxRows);
  const std::vector<float> together = invariant.read(out, size_t{kMaxRows} * kN);
  for (const int32_t rows : {1, 2, 3, 17, 64, 200}) {
    invariant->linear(weights, in, out, rows);
    const std::vector<float> some = invariant.read(out, static_cast<size_t>(rows) * kN);
    EXPECT_TRUE(std::equal(some.begin(), some.end(), together.begin())) << rows << " rows";
  }
}

TEST_F(ModelDevices, StepTheResidualAlike) {
  for (const int32_t dim : {128, 1000}) {
    constexpr int32_t kRows = 9;
    const size_t count = static_cast<size_t>(kRows) * dim;
    const std::vector<float> x = random(count, 3), branch = random(count);
    const std::vector<float> in = random(dim), out = random(dim, 0.1f);
    for (const bool has_branch_norm : {false, true}) {
      for (const bool reads_x : {false, true}) {
        const bool copies = dim == 128 && has_branch_norm;  // normed is x
        expect_same(
            reads_x ? DType::f32 : DType::bf16, dim,
            [&](Side& side) {
              ResidualStep step;
              step.x = side.floats(x, dim).floats();
              step.branch = side.floats(branch, dim).floats();
              if (has_branch_norm) step.branch_norm = {side->place(out), 1e-6f, true};
              step.branch_factor = has_branch_norm ? 1 : 0.22f;
              if (!copies) step.norm = {side->place(in), 1e-5f, false};
              step.normed = side.activations(std::vector<float>(count), dim);
              step.rows = kRows;
              step.dim = dim;
              side->residual(step);
              return side.read(reads_x ? Rows{step.x, dim, DType::f32} : step.normed, count);
            },
            "dim " + std::to_string(dim));
      }
    }
  }
}

TEST_F(ModelDevices, PrepareHeadsAlike) {
  constexpr int32_t kRows = 11, kHeads = 3, kPositions = 600;
  for (const int32_t dim : {64, 256}) {
    kernels::RopeSpec spec;
    spec.rotary_dim = dim == 64 ? 64 : 128;
    const std::vector<float> x = random(size_t{kRows} * kHeads * dim), norm = random(dim);
    const std::vector<int32_t> positions = random_ints(kRows, kPositions);
    for (int which = 0; which < 5; ++which) {
      expect_same(
          DType::bf16, dim,
          [&](Side& side) {
            HeadSteps steps;
            kernels::RopeTableView view;
            if (which == 0 || which == 1) steps.norm = {side->place(norm), 1e-6f, which == 1};
            if (which >= 1 && which <= 3) {
              kernels::RopeTable table = make_rope_table(spec, kPositions);
              view = table.view();
              view.cos = side->place(table.cos).data();
              view.sin = side->place(table.sin).data();
              steps.rotary.table = &view;
              steps.rotary.layout =
                  which == 3 ? kernels::RopeLayout::interleaved : kernels::RopeLayout::half_split;
            }
            if (which == 3) steps.l2_epsilon = 1e-5f;
            if (which == 4) steps.scale = {.factor = 0.1f, .floor_scale = 128};
            const Rows rows = side.activations(x, kHeads * dim);
            side->prepare_heads(steps, as_heads(rows, dim), kRows, kHeads, dim,
                                side.ints(positions));
            return side.read(rows, x.size());
          },
          "steps " + std::to_string(which) + ", dim " + std::to_string(dim));
    }
  }
}

// The rows of all heads together exceed what a warp holds.
TEST_F(ModelDevices, NormLongRowsAlike) {
  constexpr int32_t kRows = 5;
  for (const int32_t dim : {2048, 2056, 5120}) {
    const std::vector<float> x = random(static_cast<size_t>(kRows) * dim), norm = random(dim);
    expect_same(
        DType::bf16, dim,
        [&](Side& side) {
          HeadSteps steps;
          steps.norm = {side->place(norm), 1e-6f, false};
          const Rows rows = side.activations(x, dim);
          side->prepare_heads(steps, as_heads(rows, dim), kRows, 1, dim, nullptr);
          return side.read(rows, x.size());
        },
        "dim " + std::to_string(dim));
  }
}

TEST_F(ModelDevices, ActivateAndGateAlike) {
  constexpr int32_t kRows = 13, kWidth = 72;
  const std::vector<float> in = random(size_t{kRows} * 2 * kWidth, 6);
  for (const kernels::Activation activation :
       {kernels::Activation::silu, kernels::Activation::gelu_tanh,
        kernels::Activation::clamped_swiglu}) {
    for (const bool alternates : {false, true}) {
      expect_same(
          DType::bf16, kWidth,
          [&](Side& side) {
            MlpParts parts;
            parts.down.k = kWidth;
            parts.activation = activation;
            parts.alternates = alternates;
            const Rows out = side.activations(std::vector<float>(in.size() / 2), kWidth);
            side->gated_activation(parts, side.activations(in, 2 * kWidth), out, kRows);
            return side.read(out, in.size() / 2);
          },
          "activation " + std::to_string(static_cast<int>(activation)));
    }
  }
  for (const int32_t gate_dim : {1, kWidth}) {
    expect_same(
        DType::bf16, kWidth,
        [&](Side& side) {
          const Rows rows = side.activations(in, 2 * kWidth);
          const HeadRows heads = as_heads(rows, 2 * kWidth);
          side->sigmoid_gate(heads, from_dim(heads, kWidth), kRows, 1, kWidth, gate_dim);
          std::vector<float> all = side.read(rows, in.size()), some;
          for (size_t row = 0; row < kRows; ++row) {
            some.insert(some.end(), all.begin() + row * 2 * kWidth,
                        all.begin() + row * 2 * kWidth + kWidth);
          }
          return some;
        },
        "gate_dim " + std::to_string(gate_dim));
  }
}

TEST_F(ModelDevices, MultiplyBySingleColumnsAlike) {
  constexpr int32_t kRows = 43, kWidth = 136;
  const std::vector<float> x = random(size_t{kRows} * kWidth), weight = random(kWidth);
  for (const bool is_kn : {false, true}) {
    for (const bool has_bias : {false, true}) {
      expect_same(
          DType::f32, kRows,
          [&](Side& side) {
            const Rows out = side.floats(std::vector<float>(kRows, NAN), 1);
            const Linear linear =
                side.linear(weight, 1, kWidth, is_kn,
                            has_bias ? std::vector<float>{2.5f} : std::vector<float>{});
            side->linear(linear, side.activations(x, kWidth), out, kRows);
            return side.read(out, kRows);
          },
          is_kn ? "a column" : "a row");
    }
  }
}

TEST_F(ModelDevices, GatherAndCapAlike) {
  constexpr int32_t kTable = 50, kDim = 120, kRows = 31;
  const std::vector<float> table = random(size_t{kTable} * kDim, 20);
  const std::vector<int32_t> ids = random_ints(kRows, kTable);
  for (const bool embeds : {false, true}) {
    expect_same(
        DType::f32, kDim,
        [&](Side& side) {
          const Rows out = side.floats(std::vector<float>(size_t{kRows} * kDim), kDim);
          if (embeds) {
            kernels::EmbeddingParams params;
            params.table = side->place(side.tensor(table), "embedding");
            params.dtype = DType::bf16;
            params.table_rows = kTable;
            params.ids = side.ints(ids);
            params.out = out.floats();
            params.rows = kRows;
            params.dim = kDim;
            params.factor = 11.25f;
            side->embedding(params);
          } else {
            kernels::ExpertRowsParams params;
            params.x = side.floats(table, kDim).floats();
            params.out = out.floats();
            params.x_stride = params.out_stride = kDim;
            params.index = side.ints(ids);
            params.rows = kRows;
            params.dim = kDim;
            side->gather_rows(params);
          }
          side->soft_cap(out.floats(), 30, int64_t{kRows} * kDim);
          return side.read(out, size_t{kRows} * kDim);
        },
        embeds ? "embedding" : "gather");
  }
}

// Slots of -1 are padding; without slots rows keep their order. Tokens without a column have no
// logit.
TEST_F(ModelDevices, StoreRowsAndSpreadColumnsAlike) {
  constexpr int32_t kDim = 72, kRows = 19, kTable = 40;
  const std::vector<float> x = random(size_t{kRows} * kDim, 21);
  std::vector<int64_t> slots(kRows, -1);
  for (int32_t r = 0; r < kRows; r += r % 5 == 3 ? 2 : 1) slots[static_cast<size_t>(r)] = 2 * r;
  for (const bool by_slots : {true, false}) {
    expect_same(
        DType::f32, kDim,
        [&](Side& side) {
          const Rows out = side.floats(std::vector<float>(size_t{kTable} * kDim, 3), kDim);
          const int64_t* const index = by_slots ? side.longs(slots) : nullptr;
          side->store_rows(side.floats(x, kDim), out, index, kRows, kDim);
          return side.read(out, size_t{kTable} * kDim);
        },
        by_slots ? "stored rows" : "copied rows");
  }
  constexpr int32_t kWide = 200;
  std::vector<int32_t> columns(kWide, -1);
  for (int32_t c = 0; c < kDim; ++c) columns[static_cast<size_t>(c * 2 + c % 3)] = c;
  expect_same(
      DType::f32, kWide,
      [&](Side& side) {
        const Rows out = side.floats(std::vector<float>(size_t{kRows} * kWide), kWide);
        side->spread_columns(side.floats(x, kDim), out, side->place_ints(columns), kRows, kWide);
        std::vector<float> values = side.read(out, size_t{kRows} * kWide);
        for (float& value : values) value = std::max(value, -1e9f);  // -inf has no difference
        return values;
      },
      "spread columns");
}

// More than one piece is in flight to the device; the last piece is short.
TEST_F(ModelDevices, PlaceWeightsThatAreMade) {
  constexpr std::array<int64_t, 2> kShape = {4099, 8192};
  const Checkpoint made =
      Checkpoint::random("", JsonObject::parse("{}", "config.json"), 7, threads_);
  const StoredTensor& tensor = made.tensor("a.weight", kShape);
  const StoredTensor& other = made.tensor("b.weight", kShape);
  const auto bits = [&](Side& side, const std::byte* placed, size_t bytes) {
    return side.read<uint16_t>(placed, bytes / sizeof(uint16_t));
  };
  const std::byte* const on_gpu = cuda()->place(tensor, "a.weight");
  EXPECT_EQ(cuda()->place(tensor, "a.weight"), on_gpu);
  const std::vector<uint16_t> want = bits(host(), host()->place(tensor, "a.weight"), tensor.bytes);
  EXPECT_EQ(bits(cuda(), on_gpu, tensor.bytes), want);
  const std::array<const StoredTensor*, 2> both = {&tensor, &other};
  const std::vector<uint16_t> joined =
      bits(cuda(), cuda()->place_joined(both, "both"), 2 * tensor.bytes);
  EXPECT_TRUE(std::equal(want.begin(), want.end(), joined.begin()));
  const std::vector<uint16_t> second = bits(host(), host()->place(other, "b.weight"), other.bytes);
  EXPECT_TRUE(
      std::equal(second.begin(), second.end(), joined.begin() + static_cast<int64_t>(want.size())));
}

TEST_F(ModelDevices, RefuseWhatTheGpuDoesNotMultiply) {
  StoredTensor tensor;
  tensor.dtype = DType::f32;
  test::expect_error(ErrorCode::unsupported, "'lm_head.weight' is fp32",
                     [&] { cuda()->place(tensor, "lm_head.weight"); });
}

}  // namespace
}  // namespace fovea
