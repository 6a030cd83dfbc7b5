// SPDX-License-Identifier: Apache-2.0
// Merges the partial results of row tiles that several CTAs shared, in ascending order of keys.
// CTAs (c, any) share the rows of merges[c]. A warp takes a row, and each of its lanes four
// columns.
#pragma once

#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/visibility.cuh"

namespace fovea::kernels::cuda {

constexpr int kMergeWarps = 8;
constexpr int kColumns = 4;  // columns of a lane at a time
constexpr int kAhead = 8;    // parts that a lane loads at once

template <int kRowTile, Type kOut>
struct MergeConfig {
  using Params = MergeParams;
  static constexpr int kBlocksPerSm = 3;
  static constexpr KernelTraits kTraits = {kMergeWarps * 32, 0, kRowTile, kBlockKeys};

  __device__ static int64_t partial_row(const MergeItem& item, int part, int row) {
    const int slot = part == 0 ? item.first : item.first + 2 * part - 1;
    return static_cast<int64_t>(slot) * kRowTile + row;
  }

  __device__ static float warp_max(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
      value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
    return value;
  }

  // Loads the values of a row in kAhead parts from `part` on; missing parts give 0.
  __device__ static void load(const Params& params, const MergeItem& item, int row, int part,
                              int column, float4 (&values)[kAhead]) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      values[i] = {};
      if (part + i < item.count && column < params.head_dim_v) {
        values[i] = *reinterpret_cast<const float4*>(
            params.work.partial_out + partial_row(item, part + i, row) * params.head_dim_v +
            column);
      }
    }
  }

  __device__ static void store(const Params& params, int64_t token, int head, int column,
                               const float4& sum) {
    if (params.f32_out) {
      const int64_t at = (token * params.batch.q_heads + head) * params.head_dim_v + column;
      *reinterpret_cast<float4*>(static_cast<float*>(params.out) + at) = sum;
    } else {
      auto* out = static_cast<uint16_t*>(params.out) + token * params.out_token_stride +
                  head * params.out_head_stride + column;
      *reinterpret_cast<uint2*>(out) = {pack<kOut>(sum.x, sum.y), pack<kOut>(sum.z, sum.w)};
    }
  }

  __device__ static void merge_row(const Params& params, const MergeItem& item,
                                   const RequestView& view, int row) {
    const int lane = threadIdx.x % 32;
    const int group = params.batch.q_heads / params.batch.kv_heads;
    const int head = item.kv_head * group + (item.first_row + row) % group;
    const int64_t token = view.q_begin + (item.first_row + row) / group;
    // These loads overlap with the search for weights.
    float4 values[kAhead];
    load(params, item, row, 0, kColumns * lane, values);
    // Each lane reads the LSE of one part.
    float lse_of_lane = -infinity();
    if (lane < item.count) lse_of_lane = params.work.partial_lse[partial_row(item, lane, row)];
    float most = lse_of_lane;
#pragma unroll 1
    for (int part = lane + 32; part < item.count; part += 32) {
      most = fmaxf(most, params.work.partial_lse[partial_row(item, part, row)]);
    }
    most = warp_max(most);
    const bool empty = most == -infinity();
    float total = empty ? 0 : __expf(lse_of_lane - most);
#pragma unroll 1
    for (int part = lane + 32; part < item.count && !empty; part += 32) {
      total += __expf(params.work.partial_lse[partial_row(item, part, row)] - most);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
    const float lse = empty ? -infinity() : most + logf(total);
    if (params.lse && lane == 0) params.lse[token * params.lse_token_stride + head] = lse;
    const float base =
        params.sinks && !empty ? lse + log1pf(__expf(params.sinks[head] - lse)) : lse;
#pragma unroll 1
    for (int first = 0; first < params.head_dim_v; first += 32 * kColumns) {
      const int column = first + kColumns * lane;
      float4 sum = {};
      float weight = 0;  // the weight of part `lane` of 32
#pragma unroll 1
      for (int part = 0; part < item.count && !empty; part += kAhead) {
        if (first + part > 0) load(params, item, row, part, column, values);
        if (part % 32 == 0) {
          weight = 0;
          if (part + lane < item.count) {
            weight = __expf(params.work.partial_lse[partial_row(item, part + lane, row)] - base);
          }
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const float of_part = __shfl_sync(~0u, weight, (part + i) % 32);
          sum.x += of_part * values[i].x;
          sum.y += of_part * values[i].y;
          sum.z += of_part * values[i].z;
          sum.w += of_part * values[i].w;
        }
      }
      if (column < params.head_dim_v) store(params, token, head, column, sum);
    }
  }

  __device__ static void run(const Params& params) {
    // The list is complete: the preceding attention, or one before it, waited for the plan before
    // it let this kernel start.
    const MergeItem item = params.work.merges[blockIdx.x];
    RequestView view = {};
    if (item.count > 0) view = request_view(params.batch, item.request);
    // One CTA stays to wait for the attention, so that kernels that wait for this one wait for the
    // attention too.
    if (item.count == 0 && blockIdx.x + blockIdx.y > 0) return;
    wait_and_allow_next();
    if (item.count == 0) return;
    const int group = params.batch.q_heads / params.batch.kv_heads;
    const int rows = min(kRowTile, view.q_len * group - item.first_row);
    const int first =
        static_cast<int>(blockIdx.y) * kMergeWarps + static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
    for (int row = first; row < rows; row += static_cast<int>(gridDim.y) * kMergeWarps) {
      merge_row(params, item, view, row);
    }
  }
};

template <int kRowTile, Type kOut>
using Config = MergeConfig<kRowTile, kOut>;

}  // namespace fovea::kernels::cuda
