// SPDX-License-Identifier: Apache-2.0
// The operations around linear layers, on a GPU against the CPU.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gpu/model_devices.h"

namespace fovea {
namespace {

// Two key heads with three value heads each.
TEST_F(ModelDevices, DeltaNetsPrepareInputsAlike) {
  constexpr int32_t kRows = 29, kKeyHeads = 2, kValueHeads = 6, kKeyDim = 20, kValueDim = 12;
  constexpr int32_t kKeys = kKeyHeads * kKeyDim, kValues = kValueHeads * kValueDim;
  const std::vector<float> qkvz = random(size_t{kRows} * 2 * (kKeys + kValues));
  const std::vector<float> ba = random(size_t{kRows} * 2 * kValueHeads, 8);
  const std::vector<float> a_log = random(kValueHeads), dt_bias = random(kValueHeads);
  constexpr size_t kMixed = 2 * kKeys + kValues;
  constexpr size_t kWidths[] = {kMixed, kValues, kValueHeads, kValueHeads};
  for (size_t part = 0; part < std::size(kWidths); ++part) {
    expect_same(
        DType::f32, kWidths[part],
        [&](Side& side) {
          std::vector<Rows> out;
          for (const size_t width : kWidths) {
            out.push_back(
                side.floats(std::vector<float>(kRows * width, NAN), static_cast<int64_t>(width)));
          }
          kernels::DeltaInputsParams params;
          params.qkvz = side.floats(qkvz, 2 * (kKeys + kValues)).floats();
          params.ba = side.floats(ba, 2 * kValueHeads).floats();
          params.a_log = side->place(a_log).data();
          params.dt_bias = side->place(dt_bias).data();
          params.mixed = out[0].floats();
          params.z = out[1].floats();
          params.log_decay = out[2].floats();
          params.beta = out[3].floats();
          params.rows = kRows;
          params.key_heads = kKeyHeads;
          params.value_heads = kValueHeads;
          params.key_dim = kKeyDim;
          params.value_dim = kValueDim;
          side->delta_inputs(params);
          return side.read(out[part], kRows * kWidths[part]);
        },
        "part " + std::to_string(part));
  }
}

TEST_F(ModelDevices, Mamba2LayersPrepareInputsAlike) {
  constexpr int32_t kRows = 29, kValues = 72, kConv = 104, kHeads = 6;
  const std::vector<float> projected = random(size_t{kRows} * (kValues + kConv + kHeads), 8);
  const std::vector<float> a_log = random(kHeads), dt_bias = random(kHeads);
  constexpr size_t kWidths[] = {kValues, kConv, kHeads, kHeads};
  for (size_t part = 0; part < std::size(kWidths); ++part) {
    expect_same(
        DType::f32, kWidths[part],
        [&](Side& side) {
          std::vector<Rows> out;
          for (const size_t width : kWidths) {
            out.push_back(
                side.floats(std::vector<float>(kRows * width, NAN), static_cast<int64_t>(width)));
          }
          kernels::Mamba2InputsParams params;
          params.projected = side.floats(projected, kValues + kConv + kHeads).floats();
          params.a_log = side->place(a_log).data();
          params.dt_bias = side->place(dt_bias).data();
          params.dt_min = 0.25f;
          params.dt_max = 4;
          params.z = out[0].floats();
          params.mixed = out[1].floats();
          params.log_decay = out[2].floats();
          params.dt = out[3].floats();
          params.rows = kRows;
          params.values = kValues;
          params.conv_dim = kConv;
          params.heads = kHeads;
          side->mamba2_inputs(params);
          return side.read(out[part], kRows * kWidths[part]);
        },
        "part " + std::to_string(part));
  }
}

TEST_F(ModelDevices, KdaLayersMakeGatesAlike) {
  constexpr int32_t kRows = 31, kHeads = 5, kDim = 24;
  const std::vector<float> decays = random(size_t{kRows} * kHeads * kDim, 8);
  const std::vector<float> beta = random(size_t{kRows} * kHeads, 8);
  const std::vector<float> a_log = random(kHeads), dt_bias = random(kHeads * kDim);
  for (const bool reads_beta : {false, true}) {
    const int32_t width = reads_beta ? kHeads : kHeads * kDim;
    expect_same(
        DType::f32, width,
        [&](Side& side) {
          const Rows own_decays = side.floats(decays, kHeads * kDim);
          const Rows own_beta = side.floats(beta, kHeads);
          kernels::KdaGatesParams params;
          params.a_log = side->place(a_log).data();
          params.dt_bias = side->place(dt_bias).data();
          params.log_decay = own_decays.floats();
          params.beta = own_beta.floats();
          params.rows = kRows;
          params.heads = kHeads;
          params.key_dim = kDim;
          side->kda_gates(params);
          return side.read(reads_beta ? own_beta : own_decays, size_t{kRows} * width);
        },
        reads_beta ? "beta" : "decays");
  }
}

TEST_F(ModelDevices, Mamba1LayersGateAlike) {
  constexpr int32_t kRows = 23, kDim = 40, kStride = 56;
  const std::vector<float> x = random(size_t{kRows} * kStride, 3);
  const std::vector<float> gate = random(size_t{kRows} * kDim, 8);
  for (const bool gated : {true, false}) {
    expect_same(
        DType::bf16, kDim,
        [&](Side& side) {
          const Rows out = side.activations(std::vector<float>(size_t{kRows} * kDim, NAN), kDim);
          const Rows own_gate = gated ? side.floats(gate, kDim) : Rows{};
          side->silu_gate(side.floats(x, kStride), own_gate, out, kRows, kDim);
          return side.read(out, size_t{kRows} * kDim);
        },
        gated ? "gated" : "rounded");
  }
  expect_same(
      DType::f32, kDim,
      [&](Side& side) {
        const Rows dt = side.floats(gate, kDim);
        side->softplus(dt.floats(), int64_t{kRows} * kDim);
        return side.read(dt, size_t{kRows} * kDim);
      },
      "softplus");
}

// To activations and in place.
TEST_F(ModelDevices, ShortConvolutionsGateAlike) {
  constexpr int32_t kRows = 21, kDim = 44, kStride = 3 * kDim;
  const std::vector<float> rows = random(size_t{kRows} * kStride, 3);
  for (const DType type : {DType::bf16, DType::f32}) {
    const bool in_place = type == DType::f32;
    expect_same(
        type, in_place ? kStride : kDim,
        [&](Side& side) {
          const Rows x = side.floats(rows, kStride), y = from_column(x, 2 * kDim);
          const std::vector<float> empty(size_t{kRows} * kDim, NAN);
          const Rows out = in_place ? x : side.activations(empty, kDim);
          side->multiply(x, y, out, kRows, kDim);
          return side.read(out, static_cast<size_t>(kRows * out.stride));
        },
        std::string(dtype_name(type)));
  }
}

// Squares, and the norm with those of all parts: from f32 with a gate, and in place.
TEST_F(ModelDevices, DividedNormsAlike) {
  constexpr int32_t kRows = 19, kDim = 300, kStride = 312;
  const std::vector<float> x = random(size_t{kRows} * kStride, 3);
  const std::vector<float> gate = random(size_t{kRows} * kDim, 2), weight = random(kDim);
  const std::vector<float> sums(kRows, 900.0f);
  for (const bool gated : {true, false}) {
    const auto step_of = [&](Side& side) {
      DividedNorm step;
      step.norm = {.weight = side->place(weight), .epsilon = 1e-5f, .plus_one = !gated};
      step.x = gated ? side.floats(x, kStride) : side.activations(x, kStride);
      step.out = gated ? side.activations(std::vector<float>(x.size()), kStride) : step.x;
      if (gated) step.gate = side.floats(gate, kDim);
      step.squares = side.floats(sums, 1).floats();
      step.rows = kRows;
      step.parts = 3;
      return step;
    };
    const std::string what = gated ? ", gated" : ", in place";
    expect_same(
        DType::f32, 1,
        [&](Side& side) {
          const DividedNorm step = step_of(side);
          side->divided_norm_squares(step);
          return side.read({step.squares, 1, DType::f32}, kRows);
        },
        "squares" + what);
    expect_same(
        DType::bf16, kStride,
        [&](Side& side) {
          const DividedNorm step = step_of(side);
          side->divided_norm_scale(step);
          return side.read(step.out, x.size());
        },
        "divided norm" + what);
  }
}

// Heads of a warp and heads of a block.
TEST_F(ModelDevices, GatedNormsAlike) {
  using enum kernels::NormGate;
  constexpr int32_t kRows = 19, kHeads = 3;
  for (const int32_t dim : {72, 1000}) {
    for (const kernels::NormGate gate_function : {silu, sigmoid, silu_before}) {
      const std::vector<float> x = random(size_t{kRows} * kHeads * dim, 3);
      const std::vector<float> gate = random(x.size(), 2);
      const std::vector<float> weight = random(gate_function == silu_before ? kHeads * dim : dim);
      expect_same(
          DType::bf16, dim,
          [&](Side& side) {
            const Rows out = side.activations(std::vector<float>(x.size(), NAN), kHeads * dim);
            const Norm norm{.weight = side->place(weight), .epsilon = 1e-5f};
            side->gated_norm({norm, gate_function}, as_heads(side.floats(x, kHeads * dim), dim),
                             as_heads(side.floats(gate, kHeads * dim), dim), as_heads(out, dim),
                             kRows, kHeads);
            return side.read(out, x.size());
          },
          "gated norm " + std::to_string(static_cast<int>(gate_function)) + " of " +
              std::to_string(dim));
    }
  }
}

}  // namespace
}  // namespace fovea
