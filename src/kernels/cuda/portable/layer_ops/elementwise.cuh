// SPDX-License-Identifier: Apache-2.0
// Element-wise operations in grid-stride loops: activations, gates, gathered rows, slots, the soft
// cap of the logits.
#pragma once

#include "kernels/cuda/portable/layer_ops/config.cuh"

namespace fovea::kernels::cuda {

constexpr int kElementThreads = 256;
constexpr KernelTraits kElementTraits = {kElementThreads, 0, 0, 0};

__device__ inline int64_t first_element() {
  return static_cast<int64_t>(blockIdx.x) * kElementThreads + threadIdx.x;
}
__device__ inline int64_t element_step() {
  return static_cast<int64_t>(gridDim.x) * kElementThreads;
}

struct GatedConfig {
  using Params = GatedParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = kElementTraits;

  __device__ static float activate(const Params& params, float gate, float up) {
    return gated_value(params.activation, params.alpha, params.limit, gate, up);
  }

  // Four elements at a time, which spares most of the divisions.
  __device__ static bool takes_fours(const Params& params) {
    return params.in_step == 1 && params.dim % 4 == 0 && params.in_stride % 4 == 0 &&
           params.out_stride % 4 == 0 && is_aligned(params.gate, 8) && is_aligned(params.up, 8) &&
           is_aligned(params.out, 8) && params.rows * params.dim / 4 < (1ll << 31);
  }

  __device__ static void run_fours(const Params& params) {
    const auto fours = static_cast<uint32_t>(params.dim / 4);
    const auto count = static_cast<uint32_t>(params.rows) * fours;
    for (auto i = static_cast<uint32_t>(first_element()); i < count; i += element_step()) {
      const int64_t row = i / fours;
      const int64_t column = i % fours * 4;
      const int64_t in = row * params.in_stride + column;
      const float4 gate = four_from_bf16(static_cast<const uint16_t*>(params.gate) + in);
      const float4 up = four_from_bf16(static_cast<const uint16_t*>(params.up) + in);
      four_to_bf16(static_cast<uint16_t*>(params.out) + row * params.out_stride + column,
                   {activate(params, gate.x, up.x), activate(params, gate.y, up.y),
                    activate(params, gate.z, up.z), activate(params, gate.w, up.w)});
    }
  }

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    if (takes_fours(params)) return run_fours(params);
    const int64_t count = params.rows * params.dim;
    for (int64_t i = first_element(); i < count; i += element_step()) {
      const int64_t row = i / params.dim;
      const int64_t column = i % params.dim;
      const int64_t in = row * params.in_stride + column * params.in_step;
      const float gate = from_bf16(static_cast<const uint16_t*>(params.gate)[in]);
      const float up = from_bf16(static_cast<const uint16_t*>(params.up)[in]);
      static_cast<uint16_t*>(params.out)[row * params.out_stride + column] =
          to_bf16(activate(params, gate, up));
    }
  }
};

struct SigmoidGateConfig {
  using Params = SigmoidGateKernelParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = kElementTraits;

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    const int64_t count = static_cast<int64_t>(params.rows) * params.heads * params.dim;
    for (int64_t i = first_element(); i < count; i += element_step()) {
      const int64_t dim = i % params.dim;
      const int64_t head = i / params.dim % params.heads;
      const int64_t row = i / params.dim / params.heads;
      const int64_t at = row * params.x_row_stride + head * params.x_head_stride + dim;
      const int64_t gate_at = row * params.gate_row_stride + head * params.gate_head_stride +
                              (params.gate_dim == 1 ? 0 : dim);
      const float gate = params.gate_is_f32
                             ? static_cast<const float*>(params.gate)[gate_at]
                             : from_bf16(static_cast<const uint16_t*>(params.gate)[gate_at]);
      if (params.x_is_f32) {
        static_cast<float*>(params.x)[at] *= sigmoid_of(gate);
      } else {
        auto* const x = static_cast<uint16_t*>(params.x);
        x[at] = to_bf16(from_bf16(x[at]) * sigmoid_of(gate));
      }
    }
  }
};

struct GatherConfig {
  using Params = GatherParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = kElementTraits;

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    const int64_t count = static_cast<int64_t>(params.rows) * params.dim;
    for (int64_t i = first_element(); i < count; i += element_step()) {
      const int64_t row = i / params.dim;
      const int64_t column = i % params.dim;
      const int64_t index = params.index[row];
      const int64_t from =
          (index >= 0 && index < params.table_rows ? index : 0) * params.table_stride + column;
      const float value = params.table_is_f32
                              ? static_cast<const float*>(params.table)[from]
                              : from_bf16(static_cast<const uint16_t*>(params.table)[from]);
      params.out[row * params.out_stride + column] = value * params.factor;
    }
  }
};

struct StoreRowsConfig {
  using Params = StoreRowsParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = kElementTraits;

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    const int64_t count = static_cast<int64_t>(params.rows) * params.dim;
    for (int64_t i = first_element(); i < count; i += element_step()) {
      const int64_t row = i / params.dim;
      const int64_t column = i % params.dim;
      const int64_t to = params.index ? params.index[row] : row;
      if (to < 0) continue;
      const int64_t from = row * params.x_stride + column;
      params.out[to * params.out_stride + column] =
          params.x_is_f32 ? static_cast<const float*>(params.x)[from]
                          : from_bf16(static_cast<const uint16_t*>(params.x)[from]);
    }
  }
};

struct SpreadColumnsConfig {
  using Params = SpreadColumnsParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = kElementTraits;

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    const int64_t count = static_cast<int64_t>(params.rows) * params.dim;
    for (int64_t i = first_element(); i < count; i += element_step()) {
      const int64_t row = i / params.dim;
      const int64_t column = i % params.dim;
      const int32_t from = params.index[column];
      params.out[row * params.out_stride + column] =
          from < 0 ? -__int_as_float(0x7f800000) : params.x[row * params.x_stride + from];
    }
  }
};

struct RecordSlotsConfig {
  using Params = RecordSlotsParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = kElementTraits;

  __device__ static void run(const Params& params) {
    for (int64_t t = first_element(); t < params.tokens; t += element_step()) {
      const int32_t drawn_by = params.drawn_by[t];
      if (drawn_by >= 0) params.token_ids[t] = params.drawn[drawn_by];
      const int64_t slot = params.slots[t];
      if (slot < 0) continue;
      params.table[params.rows[t] * params.stride + params.places[t]] = static_cast<int32_t>(slot);
    }
  }
};

struct SoftCapConfig {
  using Params = SoftCapParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = kElementTraits;

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    for (int64_t i = first_element(); i < params.count; i += element_step()) {
      params.x[i] = params.cap * tanhf(params.x[i] / params.cap);
    }
  }
};

}  // namespace fovea::kernels::cuda
