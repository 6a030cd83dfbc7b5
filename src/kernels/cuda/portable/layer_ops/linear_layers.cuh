// SPDX-License-Identifier: Apache-2.0
// The operations around the recurrences of linear layers: their inputs from projections, and the
// gated norm of their results.
#pragma once

#include "kernels/cuda/portable/layer_ops/elementwise.cuh"

namespace fovea::kernels::cuda {

__device__ inline float softplus_of(float x) { return x > 20 ? x : log1pf(expf(x)); }

struct DeltaInputsConfig {
  using Params = DeltaInputsKernelParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = kElementTraits;

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
      params.log_decay[to] = -expf(params.a_log[head]) * softplus_of(value + params.dt_bias[head]);
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

struct Mamba2InputsConfig {
  using Params = Mamba2InputsKernelParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = kElementTraits;

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    const int width = params.values + params.conv_dim + params.heads;
    const int64_t count = static_cast<int64_t>(params.rows) * width;
    for (int64_t i = first_element(); i < count; i += element_step()) {
      const int64_t row = i / width;
      const auto at = static_cast<int>(i % width);
      const float value = params.projected[i];
      if (at < params.values) {
        params.z[row * params.values + at] = value;
      } else if (at < params.values + params.conv_dim) {
        params.mixed[row * params.conv_dim + at - params.values] = value;
      } else {
        const int head = at - params.values - params.conv_dim;
        const float step = softplus_of(value + params.dt_bias[head]);
        const float dt = fminf(fmaxf(step, params.dt_min), params.dt_max);
        params.dt[row * params.heads + head] = dt;
        params.log_decay[row * params.heads + head] = -expf(params.a_log[head]) * dt;
      }
    }
  }
};

struct KdaGatesConfig {
  using Params = KdaGatesKernelParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = kElementTraits;

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    const int decays = params.heads * params.key_dim;
    const int64_t count = static_cast<int64_t>(params.rows) * (decays + params.heads);
    for (int64_t i = first_element(); i < count; i += element_step()) {
      const int64_t row = i / (decays + params.heads);
      const auto at = static_cast<int>(i % (decays + params.heads));
      if (at < decays) {
        float& decay = params.log_decay[row * decays + at];
        decay = -expf(params.a_log[at / params.key_dim]) * softplus_of(decay + params.dt_bias[at]);
      } else {
        float& beta = params.beta[row * params.heads + at - decays];
        beta = sigmoid_of(beta);
      }
    }
  }
};

struct SiluGateConfig {
  using Params = SiluGateKernelParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = kElementTraits;

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    const int64_t count = static_cast<int64_t>(params.rows) * params.dim;
    for (int64_t i = first_element(); i < count; i += element_step()) {
      const int64_t row = i / params.dim, at = i % params.dim;
      float value = params.x[row * params.x_stride + at];
      if (params.gate != nullptr) {
        const float gate = params.gate[row * params.gate_stride + at];
        value *= params.plain ? gate : gate * sigmoid_of(gate);
      }
      const int64_t to = row * params.out_stride + at;
      if (params.out_is_f32) {
        static_cast<float*>(params.out)[to] = value;
      } else {
        static_cast<uint16_t*>(params.out)[to] = to_bf16(value);
      }
    }
  }
};

struct SoftplusConfig {
  using Params = SoftplusParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = kElementTraits;

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    for (int64_t i = first_element(); i < params.count; i += element_step()) {
      params.x[i] = softplus_of(params.x[i]);
    }
  }
};

struct GatedNormConfig {
  using Params = GatedNormParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kWarps = 8;
  static constexpr KernelTraits kTraits = {kWarps * 32, 0, kWarps, 0};

  struct Head {
    const float* x;
    const float* gate;
    const float* weight;
    uint16_t* out;

    __device__ Head(const Params& params, int64_t index) {
      const int64_t row = index / params.heads;
      const int64_t head = index % params.heads;
      x = params.x + row * params.x_row_stride + head * params.x_head_stride;
      gate = params.gate + row * params.gate_row_stride + head * params.gate_head_stride;
      weight = params.norm.weight + head * params.weight_head_stride;
      out = static_cast<uint16_t*>(params.out) + row * params.out_row_stride +
            head * params.out_head_stride;
    }
    // Returns what is normed, and the factor of the result.
    __device__ float input(const Params& params, int i) const {
      return params.gate_function == GateFunction::silu_before ? x[i] * silu(i) : x[i];
    }
    __device__ float factor(const Params& params, int i) const {
      if (params.gate_function == GateFunction::silu_before) return 1;
      return params.gate_function == GateFunction::silu ? silu(i) : sigmoid_of(gate[i]);
    }
    __device__ float silu(int i) const { return gate[i] * sigmoid_of(gate[i]); }
  };

  // Calls body(i) for the thread's values of a head that `threads` threads share.
  template <typename Body>
  __device__ static void for_values(const Params& params, int threads, Body body) {
    for (int i = static_cast<int>(threadIdx.x) % threads; i < params.dim; i += threads) body(i);
  }

  __device__ static void run(const Params& params) {
    __shared__ float sums[kWarps];
    wait_and_allow_next();
    const bool is_wide = params.dim > kMaxWarpHead;
    const int threads = is_wide ? kWarps * 32 : 32;
    const int64_t index =
        is_wide ? blockIdx.x : static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
    if (index >= static_cast<int64_t>(params.rows) * params.heads) return;
    const Head head(params, index);
    float squares = 0;
    for_values(params, threads, [&](int i) {
      const float value = head.input(params, i);
      squares += value * value;
    });
    const float sum = is_wide ? block_sum<kWarps * 32>(squares, sums) : warp_sum(squares);
    const float factor = rsqrtf(sum / params.dim + params.norm.epsilon);
    for_values(params, threads, [&](int i) {
      const float weight = params.norm.plus + head.weight[i];
      head.out[i] = to_bf16(head.input(params, i) * factor * weight * head.factor(params, i));
    });
  }
};

// A half of a norm whose rows are divided among GPUs.
struct DividedNormConfig {
  using Params = DividedNormKernelParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kThreads = 256;
  static constexpr KernelTraits kTraits = {kThreads, 0, 1, 0};

  __device__ static float input(const Params& params, int i) {
    const int64_t at = blockIdx.x * params.x_stride + i;
    const float x = params.x_is_f32 ? static_cast<const float*>(params.x)[at]
                                    : from_bf16(static_cast<const uint16_t*>(params.x)[at]);
    if (!params.gate) return x;
    const float gate = params.gate[blockIdx.x * params.gate_stride + i];
    return x * gate * sigmoid_of(gate);
  }

  __device__ static void run(const Params& params) {
    __shared__ float sums[kThreads / 32];
    wait_and_allow_next();
    float& squares = params.squares[blockIdx.x];
    if (!params.out) {
      float own = 0;
      for (int i = threadIdx.x; i < params.dim; i += kThreads) {
        own += input(params, i) * input(params, i);
      }
      own = block_sum<kThreads>(own, sums);
      if (threadIdx.x == 0) squares = own;
      return;
    }
    const float factor = rsqrtf(squares / params.row_dim + params.norm.epsilon);
    auto* const out = static_cast<uint16_t*>(params.out) + blockIdx.x * params.out_stride;
    for (int i = threadIdx.x; i < params.dim; i += kThreads) {
      const float weight = params.norm.plus + params.norm.weight[i];
      out[i] = to_bf16(input(params, i) * factor * weight);
    }
  }
};

}  // namespace fovea::kernels::cuda
