// SPDX-License-Identifier: Apache-2.0
// The operations around the recurrence of a gated delta net: its inputs from the projections, and
// the gated norm of its results.
#pragma once

#include "kernels/cuda/portable/layer_ops/elementwise.cuh"

namespace fovea::kernels::cuda {

struct DeltaInputsConfig {
  using Params = DeltaInputsKernelParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = kElementTraits;

  __device__ static float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

  // Copies element `at` of a row of qkvz.
  __device__ static void place(const Params& params, int64_t row, int at, float value) {
    const int keys = params.key_heads * params.key_dim;
    const int of_group = params.value_heads / params.key_heads * params.value_dim;
    const int values = params.key_heads * of_group;
    const int group = at / (2 * (params.key_dim + of_group));
    const int place = at % (2 * (params.key_dim + of_group));
    float* const mixed = params.mixed + row * (2 * keys + values);
    if (place < params.key_dim) {
      mixed[group * params.key_dim + place] = value;
    } else if (place < 2 * params.key_dim) {
      mixed[keys + group * params.key_dim + place - params.key_dim] = value;
    } else if (place < 2 * params.key_dim + of_group) {
      mixed[2 * keys + group * of_group + place - 2 * params.key_dim] = value;
    } else {
      params.z[row * values + group * of_group + place - 2 * params.key_dim - of_group] = value;
    }
  }

  // Turns element `at` of a row of ba into a gate.
  __device__ static void gate(const Params& params, int64_t row, int at, float value) {
    const int per_key = params.value_heads / params.key_heads;
    const int head = at / (2 * per_key) * per_key + at % per_key;
    const int64_t to = row * params.value_heads + head;
    if (at % (2 * per_key) < per_key) {
      params.beta[to] = sigmoid_of(value);
    } else {
      params.log_decay[to] = -expf(params.a_log[head]) * softplus(value + params.dt_bias[head]);
    }
  }

  __device__ static void run(const Params& params) {
    const int inputs =
        2 * (params.key_heads * params.key_dim + params.value_heads * params.value_dim);
    const int gates = 2 * params.value_heads;
    const int64_t count = static_cast<int64_t>(params.rows) * (inputs + gates);
    for (int64_t i = first_element(); i < count; i += element_step()) {
      const int64_t row = i / (inputs + gates);
      const auto at = static_cast<int>(i % (inputs + gates));
      if (at < inputs) {
        place(params, row, at, params.qkvz[row * inputs + at]);
      } else {
        gate(params, row, at - inputs, params.ba[row * gates + at - inputs]);
      }
    }
  }
};

struct GatedNormConfig {
  using Params = GatedNormParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kWarps = 8;
  static constexpr KernelTraits kTraits = {kWarps * 32, 0, kWarps, 0};

  __device__ static void run(const Params& params) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
    if (index >= static_cast<int64_t>(params.rows) * params.heads) return;
    const int64_t row = index / params.heads;
    const int64_t head = index % params.heads;
    const int lane = threadIdx.x % 32;
    const float* const x = params.x + row * params.x_row_stride + head * params.x_head_stride;
    const float* const gate =
        params.gate + row * params.gate_row_stride + head * params.gate_head_stride;
    auto* const out = static_cast<uint16_t*>(params.out) + row * params.out_row_stride +
                      head * params.out_head_stride;
    float squares = 0;
    for (int i = lane; i < params.dim; i += 32) squares += x[i] * x[i];
    const float factor = rsqrtf(warp_sum(squares) / params.dim + params.norm.epsilon);
    for (int i = lane; i < params.dim; i += 32) {
      const float weight = params.norm.plus + params.norm.weight[i];
      out[i] = to_bf16(x[i] * factor * weight * gate[i] * sigmoid_of(gate[i]));
    }
  }
};

}  // namespace fovea::kernels::cuda
