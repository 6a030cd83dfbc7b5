// SPDX-License-Identifier: Apache-2.0
// The residual stream with its norms, and the steps of the heads of q and k.
#pragma once

#include "kernels/cuda/common/rotary.cuh"
#include "kernels/cuda/portable/layer_ops/config.cuh"

namespace fovea::kernels::cuda {

// Rows of the residual stream of up to kKept values, which a block of kBlockThreads keeps in
// registers, four adjacent values at a time.
template <int kBlockThreads, int kThreadFours>
struct ResidualRows {
  using Params = ResidualParams;
  static constexpr int kThreads = kBlockThreads;
  static constexpr int kFours = kThreadFours;  // per thread
  static constexpr int kKept = kThreads * kFours * 4;
  static constexpr KernelTraits kTraits = {kThreads, 0, 1, kKept};

  __device__ static float inverse_rms(float squares, const NormWeights& norm, int dim,
                                      float* shared) {
    return rsqrtf(block_sum<kThreads>(squares, shared) / dim + norm.epsilon);
  }

  __device__ static float sum_of_squares(const float4 (&values)[kFours]) {
    float squares = 0;
    for (const float4& four : values) {
      squares += four.x * four.x + four.y * four.y + four.z * four.z + four.w * four.w;
    }
    return squares;
  }

  __device__ static float4 load(const float* from) {
    return *reinterpret_cast<const float4*>(from);
  }

  // Returns the values times factor * (plus + weight), or times the factor without a norm.
  __device__ static float4 scaled(float4 values, float factor, const NormWeights& norm,
                                  const float4& weight) {
    if (!norm.weight) {
      return {values.x * factor, values.y * factor, values.z * factor, values.w * factor};
    }
    return {values.x * factor * (norm.plus + weight.x), values.y * factor * (norm.plus + weight.y),
            values.z * factor * (norm.plus + weight.z), values.w * factor * (norm.plus + weight.w)};
  }
  __device__ static float4 weight_at(const NormWeights& norm, int column) {
    return norm.weight ? load(norm.weight + column) : float4{};
  }

  __device__ static int column_of(int four) { return (four * kThreads + threadIdx.x) * 4; }

  // Calls body(four, column) for the thread's fours of a row.
  template <class Body>
  __device__ static void for_fours(int dim, const Body& body) {
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const int column = column_of(i);
      if (column < dim) body(i, column);
    }
  }

  // Multiplies the branch by the factor of its norm, and adds it to x.
  // x_at(four, column): the row of x.
  template <class XAt>
  __device__ static void add_branch(const ResidualParams& params, float* shared,
                                    float4 (&values)[kFours], const XAt& x_at) {
    float* const x = params.x + static_cast<int64_t>(blockIdx.x) * params.dim;
    float factor = 1;
    if (params.branch_norm.weight) {
      factor = inverse_rms(sum_of_squares(values), params.branch_norm, params.dim, shared);
    }
    for_fours(params.dim, [&](int i, int column) {
      const float4 branch =
          scaled(values[i], factor, params.branch_norm, weight_at(params.branch_norm, column));
      float4 sum = x_at(i, column);
      sum.x += params.branch_factor * branch.x;
      sum.y += params.branch_factor * branch.y;
      sum.z += params.branch_factor * branch.z;
      sum.w += params.branch_factor * branch.w;
      *reinterpret_cast<float4*>(x + column) = values[i] = sum;
    });
  }

  // Stores the norm of the row. norm_at(four, column): the norm's weights.
  template <class NormAt>
  __device__ static void store_normed(const ResidualParams& params, float* shared,
                                      const float4 (&values)[kFours], const NormAt& norm_at) {
    if (!params.normed) return;
    float factor = 1;
    if (params.norm.weight) {
      factor = inverse_rms(sum_of_squares(values), params.norm, params.dim, shared);
    }
    auto* const normed = static_cast<uint16_t*>(params.normed) + blockIdx.x * params.normed_stride;
    for_fours(params.dim, [&](int i, int column) {
      four_to_bf16(normed + column, scaled(values[i], factor, params.norm, norm_at(i, column)));
    });
  }
};

struct ResidualConfig : ResidualRows<256, 8> {
  static constexpr int kBlocksPerSm = 1;

  __device__ static bool is_kept(const Params& params) {
    return params.dim % 4 == 0 && params.dim <= kKept && params.normed_stride % 4 == 0 &&
           is_aligned(params.x, 16) && is_aligned(params.branch, 16) &&
           is_aligned(params.normed, 8) && is_aligned(params.norm.weight, 16) &&
           is_aligned(params.branch_norm.weight, 16);
  }

  __device__ static void run_kept(const Params& params, float* shared) {
    float4 values[kFours] = {};
    const int64_t first = static_cast<int64_t>(blockIdx.x) * params.dim;
    const auto x_at = [&](int, int column) { return load(params.x + first + column); };
    for_fours(params.dim, [&](int i, int column) {
      values[i] = params.branch ? load(params.branch + first + column) : x_at(i, column);
    });
    if (params.branch) add_branch(params, shared, values, x_at);
    store_normed(params, shared, values,
                 [&](int, int column) { return weight_at(params.norm, column); });
  }

  // A thread accesses the same columns in every step, so x needs no barrier.
  __device__ static void run(const Params& params) {
    __shared__ float shared[kThreads / 32];
    wait_and_allow_next();
    const int64_t row = blockIdx.x;
    const float* const branch = params.branch + row * params.dim;
    if (is_kept(params)) return run_kept(params, shared);
    float* const x = params.x + row * params.dim;
    if (params.branch) {
      float squares = 0;
      float factor = 1;
      if (params.branch_norm.weight) {
        for (int i = threadIdx.x; i < params.dim; i += kThreads) squares += branch[i] * branch[i];
        factor = inverse_rms(squares, params.branch_norm, params.dim, shared);
      }
      for (int i = threadIdx.x; i < params.dim; i += kThreads) {
        float value = branch[i] * factor;
        if (params.branch_norm.weight) {
          value *= params.branch_norm.plus + params.branch_norm.weight[i];
        }
        x[i] += params.branch_factor * value;
      }
    }
    if (!params.normed) return;
    auto* const normed = static_cast<uint16_t*>(params.normed) + row * params.normed_stride;
    if (!params.norm.weight) {
      for (int i = threadIdx.x; i < params.dim; i += kThreads) normed[i] = to_bf16(x[i]);
      return;
    }
    float squares = 0;
    for (int i = threadIdx.x; i < params.dim; i += kThreads) squares += x[i] * x[i];
    const float factor = inverse_rms(squares, params.norm, params.dim, shared);
    for (int i = threadIdx.x; i < params.dim; i += kThreads) {
      normed[i] = to_bf16(x[i] * factor * (params.norm.plus + params.norm.weight[i]));
    }
  }
};

// A warp takes one head and keeps it in f32 from the first step to the last. Rows that are normed
// as one head may be too long to keep; their norm reads them twice.
struct HeadsConfig {
  using Params = HeadSetsParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kWarps = 4;
  static constexpr int kMaxDim = 2048;
  static constexpr KernelTraits kTraits = {kWarps * 32, kWarps* kMaxDim * 4, kWarps, 0};

  __device__ static float inverse_rms(const float* x, int dim, float epsilon) {
    float squares = 0;
    for (int i = threadIdx.x % 32; i < dim; i += 32) squares += x[i] * x[i];
    return rsqrtf(warp_sum(squares) / dim + epsilon);
  }

  __device__ static void rotate(const RotaryParams& rotary, float* x, int position) {
    const int64_t row = rotary_row(rotary, position);
    for (int i = threadIdx.x % 32; i < rotary.rotary_dim / 2; i += 32) {
      const float cos = rotary.cos[row + i];
      const float sin = rotary.sin[row + i];
      const int at = rotary.interleaved ? 2 * i : i;
      const RotaryPlace first = rotary_place(rotary, at);
      const RotaryPlace second = rotary_place(rotary, first.other);
      const float a = x[at];
      const float b = x[first.other];
      x[at] = rotated(first, a, b, cos, sin);
      x[first.other] = rotated(second, b, a, cos, sin);
    }
    __syncwarp();
  }

  __device__ static void norm_in_memory(const HeadsParams& params, uint16_t* memory) {
    const int lane = threadIdx.x % 32;
    float squares = 0;
    for (int i = lane; i < params.dim; i += 32) {
      squares += from_bf16(memory[i]) * from_bf16(memory[i]);
    }
    const float factor = rsqrtf(warp_sum(squares) / params.dim + params.norm.epsilon);
    for (int i = lane; i < params.dim; i += 32) {
      const float weight = params.norm.plus + params.norm.weight[i];
      memory[i] = to_bf16(from_bf16(memory[i]) * factor * weight);
    }
  }

  __device__ static void run(const Params& given) {
    wait_and_allow_next();
    const int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
    const int64_t of_first = static_cast<int64_t>(given.sets[0].rows) * given.sets[0].heads;
    if (item < of_first) return prepare(given.sets[0], item);
    const int64_t of_second = static_cast<int64_t>(given.sets[1].rows) * given.sets[1].heads;
    if (item - of_first < of_second) prepare(given.sets[1], item - of_first);
  }

  __device__ static void prepare(const HeadsParams& params, int64_t item) {
    extern __shared__ __align__(16) char dynamic_shared[];
    const int64_t row = item / params.heads;
    const int lane = threadIdx.x % 32;
    float* const x = reinterpret_cast<float*>(dynamic_shared) + threadIdx.x / 32 * kMaxDim;
    auto* const memory = static_cast<uint16_t*>(params.x) + row * params.row_stride +
                         item % params.heads * params.head_stride;
    if (params.dim > kMaxDim) return norm_in_memory(params, memory);
    const bool by_fours = params.dim % 4 == 0 && is_aligned(memory, 8);
    if (by_fours) {
      for (int i = lane * 4; i < params.dim; i += 128) {
        *reinterpret_cast<float4*>(x + i) = four_from_bf16(memory + i);
      }
    } else {
      for (int i = lane; i < params.dim; i += 32) x[i] = from_bf16(memory[i]);
    }
    __syncwarp();
    if (params.norm.weight) {
      const float factor = inverse_rms(x, params.dim, params.norm.epsilon);
      for (int i = lane; i < params.dim; i += 32) {
        x[i] *= factor * (params.norm.plus + params.norm.weight[i]);
      }
      __syncwarp();
    }
    if (params.rotary.cos) rotate(params.rotary, x, params.positions[row]);
    float factor = params.l2_epsilon >= 0 ? inverse_rms(x, params.dim, params.l2_epsilon) : 1.0f;
    if (params.position_scale != 0) {
      const float steps =
          floorf((static_cast<float>(params.positions[row]) + 1) / params.floor_scale);
      factor *= log1pf(steps) * params.position_scale + 1;
    }
    if (!by_fours) {
      for (int i = lane; i < params.dim; i += 32) memory[i] = to_bf16(x[i] * factor);
      return;
    }
    __syncwarp();
    for (int i = lane * 4; i < params.dim; i += 128) {
      const float4 four = *reinterpret_cast<const float4*>(x + i);
      four_to_bf16(memory + i,
                   {four.x * factor, four.y * factor, four.z * factor, four.w * factor});
    }
  }
};

}  // namespace fovea::kernels::cuda
